"""Rows times a quantized weight: checks the arguments, chooses an implementation.

On a CPU with a C++ compiler that is `cpu.cc`; on GPUs of compute capability 9.0, where
several scales share an output, the Mosaic kernel; else plain XLA. Takes arrays: what
they mean together is layers/quantized.py's business. Nobody outside this folder calls
anything else in it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from headrace.pallas_kernels.gpu_target import gpu_capability
from headrace.pallas_kernels.quantized_matmul import cpu, tuning
from headrace.pallas_kernels.quantized_matmul.tuning import KernelShape, tuned_shapes
from headrace.pallas_kernels.quantized_matmul.xla import (
    quantized_matmul_xla,
    quantized_rows_matmul_xla,
)
from headrace.pallas_kernels.row_groups import valid_rows

__all__ = [
    "Implementation", "KernelShape", "cpu_identity", "quantized_matmul",
    "quantized_rows_matmul", "tuned_shapes",
]  # fmt: skip
logger = logging.getLogger(__name__)

Implementation = Literal["mosaic_gpu", "cpu", "xla"]
# Source: NVIDIA, PTX ISA, mma with .e4m3: "requires sm_89 or higher".
_FP8_SINCE = (8, 9)


def quantized_matmul(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: Float[Array, "R I"],
    num_valid_B: Int[Array, " B"] | None = None,
    out_dtype: DTypeLike | None = None,
    *,
    most_rows: int | None = None,
    implementation: Implementation | None = None,
    interpret: Any = None,
) -> Float[Array, "R O"]:
    """Multiplies rows by a weight (values - zeros) * scales, stored (out, in).

    On a GPU one scale per output is left to XLA, whose product reads the stored values.

    Args:
      values_OI: int8, int4 or float8_e4m3fn.
      scales_OS: one per output and group of I / S inputs, float32.
      zeros_OS: zero points, or None.
      x_RI: the rows, not quantized.
      num_valid_B: see `row_matmul`.
      out_dtype: of the result; None is x's.
      most_rows: of any product of the same role, generating or filling. In the Mosaic
        kernel a row's bits depend on the row, the weight and this; None is R.
      implementation: forces one; None chooses by device, types and shapes, and says
        once in the log where a GPU gets plain XLA in the kernel's stead, and why.
      interpret: of `pallas_kernels.compat.interpreter`, to run "mosaic_gpu" on a CPU.

    Returns:
      `x @ w.T`; rows that do not count are unspecified, and finite where x and w are.

    Raises:
      ValueError: shapes or types that do not go together.
      NotImplementedError: the forced implementation does not serve these arguments.
    """
    _check(values_OI, scales_OS, zeros_OS, x_RI)
    num_valid_B = valid_rows(x_RI.shape[0], num_valid_B)
    out_dtype = jnp.dtype(out_dtype or x_RI.dtype)
    known: dict[str, Callable[..., Array]] = {
        "mosaic_gpu": functools.partial(
            _mosaic_gpu,
            out_dtype=out_dtype,
            most_rows=max(most_rows or 0, x_RI.shape[0]),
            interpret=interpret,
        ),
        "cpu": cpu.quantized_matmul_cpu,
        "xla": functools.partial(_plain, out_dtype=out_dtype),
    }
    args = (values_OI, scales_OS, zeros_OS, x_RI, num_valid_B)
    if implementation is not None:
        if implementation not in known:
            raise ValueError(
                f"implementation must be one of {list(known)} or None, got "
                f"{implementation!r}"
            )
        return known[implementation](*args)
    choices = {}
    if (capability := gpu_capability()) is not None:
        if scales_OS.shape[1] > 1:
            reason = tuning.refusal(values_OI, scales_OS, x_RI, capability)
            if reason is None:
                choices["cuda"] = known["mosaic_gpu"]
            else:
                _say_once(reason)
    elif out_dtype == jnp.float32 and cpu_identity():
        if cpu.serves(values_OI, scales_OS, x_RI):
            choices["cpu"] = known["cpu"]
    if not choices:
        return known["xla"](*args)
    return jax.lax.platform_dependent(*args, **choices, default=known["xla"])


def quantized_rows_matmul(
    values_OI: Num[Array, "O I"],
    scales_O1: Float[Array, "O 1"],
    x_RI: Num[Array, "R I"],
    x_scales_R1: Float[Array, "R 1"],
    out_dtype: DTypeLike,
    *,
    native: bool = False,
) -> Float[Array, "R O"]:
    """Multiplies quantized rows by a weight quantized likewise.

    GPUs multiply float8 from compute capability 8.9 on. Others, and CPUs, widen both
    sides, which gives the same products in more time; a GPU's log says so once.

    Args:
      values_OI, x_RI: int8 both, or float8_e4m3fn both.
      scales_O1, x_scales_R1: of each output and each row, float32.
      out_dtype: of the result.
      native: refuse to widen.

    Raises:
      ValueError: shapes or types that do not go together.
      NotImplementedError: `native`, on a device that does not multiply these types.
    """
    _check(values_OI, scales_O1, None, x_RI)
    if x_RI.dtype != values_OI.dtype or scales_O1.shape[1] != 1:
        raise ValueError(
            f"rows of {x_RI.dtype} need a weight of that type with one scale per "
            f"output, got {values_OI.dtype} with {scales_O1.shape}"
        )
    capability = gpu_capability()
    if values_OI.dtype == jnp.float8_e4m3fn and (capability or (0, 0)) < _FP8_SINCE:
        where = (
            "a CPU"
            if capability is None
            else "compute capability {}.{}".format(*capability)
        )
        if native:
            raise NotImplementedError(f"no float8 products on {where}: 8.9 or later")
        if capability is not None:
            _say_widened(where)
    return quantized_rows_matmul_xla(values_OI, scales_O1, x_RI, x_scales_R1, out_dtype)


def cpu_identity() -> str:
    """As `row_matmul.cpu_identity`: registers the kernels, names their machine code."""
    return cpu.identity() if jax.default_backend() == "cpu" else ""


def _plain(
    values: Array,
    scales: Array,
    zeros: Array | None,
    x: Array,
    _: Array,
    out_dtype: jnp.dtype,
) -> Array:
    return quantized_matmul_xla(values, scales, zeros, x, out_dtype)


def _mosaic_gpu(
    values: Array,
    scales: Array,
    zeros: Array | None,
    x: Array,
    _: Array,
    *,
    most_rows: int,
    **rest: Any,
) -> Array:
    reason = tuning.refusal(values, scales, x, tuning.CAPABILITY)
    if reason is not None:
        raise NotImplementedError(f"no kernel for {reason}")
    # Loads Mosaic GPU, which a CPU has no use for.
    from headrace.pallas_kernels.quantized_matmul.mosaic_gpu import (
        quantized_matmul_mosaic,
    )

    sizes = tuning.tuning(
        *values.shape,
        rows=x.shape[0],
        most_rows=most_rows,
        bits=4 if values.dtype.name == "int4" else 8,
    )
    return quantized_matmul_mosaic(values, scales, zeros, x, tuning=sizes, **rest)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("plain XLA instead of the kernel for quantized weights: %s", reason)


@functools.cache
def _say_widened(where: str) -> None:
    logger.warning("float8 rows and weights are widened: no such products on %s", where)


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
