"""Host arrays whose memory goes back to the system when they do.

malloc keeps freed blocks of up to 32 MiB for later; while a model is loaded they would
lie beside it. Large arrays are therefore mapped, which also suits jax: on a CPU it can
take such an array as it is.
"""

import math
import mmap

import numpy as np
from numpy.typing import DTypeLike

_LARGE_BYTES = 2**20


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """As `np.empty`; pages are taken when they are written to."""
    count, dtype = math.prod(shape), np.dtype(dtype)
    if count * dtype.itemsize < _LARGE_BYTES:
        return np.empty(shape, dtype)
    mapped = mmap.mmap(-1, count * dtype.itemsize)
    return np.frombuffer(mapped, np.uint8).view(dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """A contiguous copy."""
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
