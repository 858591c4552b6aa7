"""LLM.int8(): rows in 8 bits but for the inputs that are large in any of them.

A comparison for the quality report and no scheme of the engine: which inputs are split
off depends on all rows of a product, so a request's tokens would depend on its company.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from headrace.layers.quantized import QuantizedTensor
from headrace.layers.quantized_rows import quantize_rows
from headrace.pallas_kernels.quantized_matmul.api import quantized_rows_matmul

# Source: Dettmers et al. 2022, "LLM.int8()", section 3.2.
THRESHOLD = 6.0


def outlier_product(
    weight: QuantizedTensor, x_RI: Float[Array, "R I"]
) -> Float[Array, "R O"]:
    """The product with inputs at or over the threshold left in float32.

    Their columns of the weight are the rounded ones, as in bitsandbytes with weights
    that are kept in 8 bits.

    Args:
      weight: int8 with one scale per output, [O, I].
      x_RI: all rows of a call.

    Source: Dettmers et al. 2022, "LLM.int8(): 8-bit Matrix Multiplication for
    Transformers at Scale", equation 8.
    """
    large_I = (jnp.abs(x_RI) >= THRESHOLD).any(axis=0)
    values_RI, scales_R1 = quantize_rows(jnp.where(large_I, 0, x_RI), "int8")
    small_RO = quantized_rows_matmul(
        weight.values, weight.scales, values_RI, scales_R1, jnp.float32
    )
    plain_OI = weight.values.astype(jnp.float32) * weight.scales
    return small_RO + jnp.where(large_I, x_RI, 0) @ plain_OI.T
