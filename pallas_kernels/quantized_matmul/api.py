"""Rows times a quantized weight: checks the arguments, chooses an implementation.

On a CPU with a C++ compiler that is `cpu.cc`, else plain XLA. Takes arrays: what they
mean together is layers/quantized.py's business. Nobody outside this folder calls
anything else in it.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from headrace.pallas_kernels.quantized_matmul import cpu
from headrace.pallas_kernels.quantized_matmul.xla import (
    quantized_matmul_xla,
    quantized_rows_matmul_xla,
)
from headrace.pallas_kernels.row_groups import valid_rows


def quantized_matmul(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: Float[Array, "R I"],
    num_valid_B: Int[Array, " B"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "R O"]:
    """Multiplies rows by a weight (values - zeros) * scales, stored (out, in).

    Args:
      values_OI: int8, int4 or float8_e4m3fn.
      scales_OS: one per output and group of I / S inputs, float32.
      zeros_OS: zero points, or None.
      x_RI: the rows, not quantized.
      num_valid_B: see `row_matmul`.
      out_dtype: of the result; None is x's.

    Returns:
      `x @ w.T`; rows that do not count are unspecified, and finite where x and w are.

    Raises:
      ValueError: shapes or types that do not go together.
    """
    _check(values_OI, scales_OS, zeros_OS, x_RI)
    num_valid_B = valid_rows(x_RI.shape[0], num_valid_B)
    out_dtype = jnp.dtype(out_dtype or x_RI.dtype)

    def plain(values: Array, scales: Array, zeros: Array | None, x: Array, _: Array):
        return quantized_matmul_xla(values, scales, zeros, x, out_dtype)

    args = (values_OI, scales_OS, zeros_OS, x_RI, num_valid_B)
    is_served = cpu_identity() and cpu.serves(values_OI, scales_OS, x_RI)
    if not is_served or out_dtype != jnp.float32:
        return plain(*args)
    return jax.lax.platform_dependent(
        *args, cpu=cpu.quantized_matmul_cpu, default=plain
    )


def quantized_rows_matmul(
    values_OI: Num[Array, "O I"],
    scales_O1: Float[Array, "O 1"],
    x_RI: Num[Array, "R I"],
    x_scales_R1: Float[Array, "R 1"],
    out_dtype: DTypeLike,
) -> Float[Array, "R O"]:
    """Multiplies quantized rows by a weight quantized likewise.

    Args:
      values_OI, x_RI: int8 both, or float8_e4m3fn both.
      scales_O1, x_scales_R1: of each output and each row, float32.
      out_dtype: of the result.

    Raises:
      ValueError: shapes or types that do not go together.
    """
    _check(values_OI, scales_O1, None, x_RI)
    if x_RI.dtype != values_OI.dtype or scales_O1.shape[1] != 1:
        raise ValueError(
            f"rows of {x_RI.dtype} need a weight of that type with one scale per "
            f"output, got {values_OI.dtype} with {scales_O1.shape}"
        )
    return quantized_rows_matmul_xla(values_OI, scales_O1, x_RI, x_scales_R1, out_dtype)


def cpu_identity() -> str:
    """As `row_matmul.cpu_identity`: registers the kernels, names their machine code."""
    return cpu.identity() if jax.default_backend() == "cpu" else ""


def _check(values: Array, scales: Array, zeros: Array | None, x: Array) -> None:
    if values.dtype.name not in cpu.VALUE_TYPES:
        raise ValueError(
            f"values must be one of {cpu.VALUE_TYPES}, got {values.dtype.name}"
        )
    fits = values.ndim == x.ndim == scales.ndim == 2
    fits = fits and values.shape[1] == x.shape[1] and values.shape[0] == scales.shape[0]
    if not fits or values.shape[1] % scales.shape[1]:
        raise ValueError(
            f"rows {x.shape}, values {values.shape} and scales {scales.shape} do not "
            f"fit"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros {zeros.shape} must be like scales {scales.shape}")
