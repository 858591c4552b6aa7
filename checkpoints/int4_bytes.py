"""int4 weights as bytes: two to a byte, the earlier input in the lower half.

So XLA keeps them on a device; numpy would take a byte for each. Readers and stores
therefore hold uint8 of half the inputs, and only what is on a device is int4.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.layers.quantized import QuantizedTensor

# Of both halves: turns unsigned values into signed ones less 8, and back.
OFFSET_8 = np.uint8(0x88)


def pack_int4(values_OI: np.ndarray) -> np.ndarray:
    """Whole numbers in [-8, 7], any leading axes, as uint8 of half the inputs.

    Raises:
      ValueError: an odd number of inputs.
    """
    if values_OI.shape[-1] % 2:
        raise ValueError(
            f"int4 needs an even number of inputs, got {values_OI.shape[-1]}"
        )
    low, high = values_OI[..., 0::2], values_OI[..., 1::2]
    return low.astype(np.uint8) & 15 | high.astype(np.uint8) << np.uint8(4)


def is_packed(tensor: QuantizedTensor) -> bool:
    """Whether its values are bytes of two int4."""
    return tensor.scheme.values == "int4" and tensor.values.dtype.name == "uint8"


def weight_shape(weight: Any) -> tuple[int, ...]:
    """Of the weight that an array or a QuantizedTensor of host arrays stands for."""
    if isinstance(weight, QuantizedTensor) and is_packed(weight):
        *outputs, half = weight.values.shape
        return (*outputs, 2 * half)
    return weight.shape


def bytes_to_int4(packed: jax.Array, sharding: Any = None) -> jax.Array:
    """int4 on the device of the bytes; `sharding` is None where there is one."""
    return _to_int4(sharding)(packed)


@functools.cache
def _to_int4(sharding: Any) -> Any:
    def convert(packed: jax.Array) -> jax.Array:
        pairs = jax.lax.bitcast_convert_type(packed, jnp.int4)
        return pairs.reshape(*packed.shape[:-1], -1)

    return jax.jit(convert, out_shardings=sharding)


@jax.jit
def int4_to_bytes(values: jax.Array) -> jax.Array:
    """The inverse of `bytes_to_int4`."""
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8)
