"""Rotary position embedding in the half-split order of Hugging Face checkpoints.

Head dimension i rotates with i + H/2. Angles are float32: at position 100,000 a
bfloat16 angle would be off by hundreds of radians.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headrace.configs.schema import RopeScaling


def inverse_frequencies(
    head_dim: int, base: float, scaling: RopeScaling | None
) -> np.ndarray:
    """Radians per position of each of the H/2 rotated pairs, float32.

    Source: Su et al. 2021, equation 15; Llama 3.1's stretching of long wavelengths.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freq = (1.0 / np.power(np.float32(base), exponent)).astype(np.float32)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    low = scaling.original_context_len / scaling.low_freq_factor
    high = scaling.original_context_len / scaling.high_freq_factor
    smooth = (scaling.original_context_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * freq / scaling.factor + smooth * freq
    stretched = np.where(wavelength > low, freq / scaling.factor, between)
    return np.where(wavelength < high, freq, stretched).astype(np.float32)


def rotary_tables(
    positions_BT: Int[Array, "B T"], inverse_freq: np.ndarray
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Cosines and sines, R = H/2, shared by all layers of one call."""
    angle_BTR = positions_BT[..., None].astype(jnp.float32) * inverse_freq
    return jnp.cos(angle_BTR), jnp.sin(angle_BTR)


def rotate(
    x_BTXH: Float[Array, "B T *X H"],
    cos_BTR: Float[Array, "B T R"],
    sin_BTR: Float[Array, "B T R"],
) -> Float[Array, "B T *X H"]:
    """Rotates each head of each token by its position."""
    axes = tuple(range(2, x_BTXH.ndim - 1))
    cos, sin = (jnp.expand_dims(table, axes) for table in (cos_BTR, sin_BTR))
    a, b = jnp.split(x_BTXH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x_BTXH.dtype)
