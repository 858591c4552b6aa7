"""What the Mosaic kernels of paged attention do with a tile of keys, in registers."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

LOG2E = math.log2(math.e)
# Stands for -inf where a difference of two must not be NaN.
MASKED = -1e30

# 8-bit numbers in registers, two to a 16-bit place: 32-bit loads.
NARROW_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def widened(ref: Any) -> Array:
    """A tile of 8-bit numbers as bfloat16, exactly; e4m3 has no direct way."""
    x_TH = plgpu.load(ref, layout=NARROW_LAYOUT)
    if not jnp.issubdtype(x_TH.dtype, jnp.integer):
        x_TH = x_TH.astype(jnp.float32)
    return x_TH.astype(jnp.bfloat16)


def cleaned(x_TH: Array, num_left: Array, layout: Any) -> Array:
    """The rows past the first `num_left` as zeros."""
    key_TH = plgpu.broadcasted_iota(jnp.int32, x_TH.shape, 0, layout=layout)
    return jnp.where(key_TH < num_left, x_TH, jnp.zeros((), x_TH.dtype))


def load_scale(ref: Any) -> Array:
    """A tile's scales [TILE], one per key."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def per_query(ref: Any, shape: tuple[int, int]) -> Array:
    """A row of [N] numbers from memory, repeated over the keys."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    value_N = plgpu.load(ref, layout=layout, optimized=False)
    return lax.broadcast_in_dim(value_N, shape, [1])


def earliest_key(start: Array, context_len: Array, window: int) -> Array:
    """The first key that a row's first query sees; the others' windows begin later."""
    return jnp.clip(start + 1 - window, 0, jnp.maximum(context_len - 1, 0))
