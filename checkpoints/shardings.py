"""Puts host arrays on devices: the last step of every reader."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shardings = Callable[[tuple[str, ...]], Any] | Mapping[str, Any] | None
"""Parameter path -> sharding, a tree like the parameters, or None: default device."""

Place = Callable[[tuple[str, ...], np.ndarray], Any]
"""Parameter path and host array -> what the parameter tree holds."""

DTYPES = ("float32", "bfloat16", "float16")


def sharding_of(shardings: Shardings, path: tuple[str, ...]) -> Any:
    """The sharding of one parameter, None where the default device is meant.

    Raises:
      ValueError: the tree of shardings lacks the parameter.
    """
    if shardings is None:
        return None
    if not isinstance(shardings, Mapping):
        return shardings(path)
    node: Any = shardings
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            raise ValueError(f"shardings lack the parameter {'/'.join(path)}")
        node = node[key]
    return node


def placer(dtype: str, shardings: Shardings) -> Place:
    """Casts an array on the host and puts it on its device or devices.

    Raises:
      ValueError: a type that parameters cannot be stored in.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype!r}")
    target = jnp.dtype(dtype)

    def place(path: tuple[str, ...], array: np.ndarray) -> jax.Array:
        array = np.ascontiguousarray(array.astype(target, copy=False))
        # On the CPU jax may keep the buffer itself. A read-only one is a view of a
        # mapped file, which somebody may change under us.
        if not array.flags.writeable:
            array = array.copy()
        return jax.device_put(array, sharding_of(shardings, path))

    return place
