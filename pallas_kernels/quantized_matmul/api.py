"""Rows times a quantized weight: checks the arguments, chooses an implementation.

On a CPU with a C++ compiler that is `cpu.cc`, else plain XLA. Takes arrays: what they
mean together is layers/quantized.py's business. Nobody outside this folder calls
anything else in it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from headrace.pallas_kernels.quantized_matmul import cpu
from headrace.pallas_kernels.quantized_matmul.xla import (
    int8_matmul_xla,
    quantized_matmul_xla,
)


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
    if num_valid_B is None:
        num_valid_B = jnp.full(1, x_RI.shape[0], jnp.int32)
    if x_RI.shape[0] % num_valid_B.shape[0]:
        raise ValueError(
            f"{x_RI.shape[0]} rows do not make {num_valid_B.shape[0]} equal groups"
        )
    out_dtype = jnp.dtype(out_dtype or x_RI.dtype)

    def plain(values: Array, scales: Array, zeros: Array | None, x: Array, _: Array):
        return quantized_matmul_xla(values, scales, zeros, x, out_dtype)

    args = (values_OI, scales_OS, zeros_OS, x_RI, num_valid_B)
    if not _has_cpu_kernel(values_OI, scales_OS, x_RI.dtype, out_dtype):
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
    return int8_matmul_xla(values_OI, scales_O1, x_RI, x_scales_R1, out_dtype)


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


@functools.cache
def _even_groups(inputs: int, groups: int) -> bool:
    return inputs // groups % 2 == 0


def _has_cpu_kernel(
    values: Array, scales: Array, x_dtype: jnp.dtype, out_dtype: jnp.dtype
) -> bool:
    if not (cpu_identity() and x_dtype == out_dtype == jnp.float32):
        return False
    is_int4 = values.dtype.name == "int4"
    return not is_int4 or _even_groups(values.shape[1], scales.shape[1])
