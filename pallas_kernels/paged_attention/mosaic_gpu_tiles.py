"""What the Mosaic kernels of paged attention do with a tile of keys, in registers."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from headrace.pallas_kernels.paged_attention.options import AttentionOptions

LOG2E = math.log2(math.e)
# Stands for -inf where a difference of two must not be NaN.
MASKED = -1e30

# 8-bit numbers in registers, two to a 16-bit place: 32-bit loads.
NARROW_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X


def base2_scores(product: Array, options: AttentionOptions, head_dim: int) -> Array:
    """Scaled and capped scores, for exponentials of base 2."""
    scale, cap = options.scale_of(head_dim), options.soft_cap
    if cap is None:
        return product * (scale * LOG2E)
    # tanh(x) = 1 - 2 / (exp(2x) + 1): the GPU's own is good to 11 bits, which is 1 % of
    # a weight at a score of 30.
    power = jnp.exp2(product * (2 * scale * LOG2E / cap))
    return (1.0 - 2.0 / (power + 1.0)) * (cap * LOG2E)


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
