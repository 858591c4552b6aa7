"""Activations in 8 bits: each row by its own largest value, or by a fixed scale.

Source: Dettmers et al. 2022, LLM.int8(), section 2.1 (absmax, row by row).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from headrace.configs.quantization import ActivationType

# Largest values: int8 symmetric, float8_e4m3fn.
LIMITS: dict[ActivationType, float] = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantize_rows(
    x_RI: Float[Array, "R I"],
    dtype: ActivationType,
    fixed_scale: Float[Array, ""] | None = None,
) -> tuple[Num[Array, "R I"], Float[Array, "R 1"]]:
    """Rows as values and scales, value * scale being the row again, nearly.

    Args:
      x_RI: finite rows.
      dtype: of the values.
      fixed_scale: of all rows, which are cut off at its limits; None is one per row
        that nothing is cut off by.

    Returns:
      Values, and scales in float32. A row of zeros has scale 1.
    """
    limit = LIMITS[dtype]
    x_RI = x_RI.astype(jnp.float32)
    if fixed_scale is None:
        most_R1 = jnp.max(jnp.abs(x_RI), axis=1, keepdims=True)
        scales_R1 = jnp.where(most_R1 > 0, most_R1 / limit, 1.0)
    else:
        scales_R1 = jnp.full((x_RI.shape[0], 1), fixed_scale, jnp.float32)
    scaled = jnp.clip(x_RI / scales_R1, -limit, limit)
    if dtype == "int8":
        scaled = jnp.round(scaled)
    return scaled.astype(dtype), scales_R1
