"""Rows times quantized weights in plain XLA: GPUs without a kernel, CPUs without C++.

A scale that is an output's own is applied to the sums, so that one product reads the
stored values. Group scales cannot be. On a GPU they multiply the values in a form that
XLA fuses into the product. On a CPU few rows multiply group by group and add up scaled
sums, which builds no weight but [S, R, O] sums; many rows build the weight.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from headrace.pallas_kernels.gpu_target import gpu_capability

# On a CPU one row of int8 takes nine times as long as four; the sums are exact.
_LEAST_ROWS = 4
# Rows up to which the sums of all groups are smaller than the weight.
_FEW_ROWS = 16


def quantized_matmul_xla(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: Float[Array, "R I"],
    out_dtype: DTypeLike,
) -> Float[Array, "R O"]:
    """See `api.quantized_matmul`."""
    num_groups = scales_OS.shape[1]
    if num_groups > 1 and gpu_capability() is not None:
        return fused_matmul_xla(values_OI, scales_OS, zeros_OS, x_RI).astype(out_dtype)
    values_OSG = _centred(values_OI.reshape(*scales_OS.shape, -1), zeros_OS, x_RI.dtype)
    if num_groups == 1:
        sums_OR = _products("oi,ri->or", values_OSG[:, 0], x_RI)
        return (sums_OR * scales_OS).T.astype(out_dtype)
    if x_RI.shape[0] <= _FEW_ROWS:
        x_RSG = x_RI.reshape(x_RI.shape[0], num_groups, -1)
        sums_SOR = _products("osg,rsg->sor", values_OSG, x_RSG)
        return (sums_SOR * scales_OS.T[..., None]).sum(0).T.astype(out_dtype)
    weight_OSG = values_OSG.astype(jnp.float32) * scales_OS[..., None]
    weight_OI = weight_OSG.reshape(values_OI.shape)
    return _products("oi,ri->or", weight_OI.astype(x_RI.dtype), x_RI).T.astype(
        out_dtype
    )


def fused_matmul_xla(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: Float[Array, "R I"],
) -> Float[Array, "R O"]:
    """Group scales for GPUs: one product that reads the stored values; float32.

    XLA keeps the weight out of memory only where the operand is a product of two arrays
    of x's type, the second repeated along the inputs, and where
    engine/compile_options.py allows it. So scales are rounded to that type, 0.2 % at
    most in bfloat16, and zero points are a second, small product:
    sum((v - z) s x) = sum(v s x) - (z s) . sums of x over groups.
    """
    (outputs, inputs), num_groups = values_OI.shape, scales_OS.shape[1]
    shape_OSG = outputs, num_groups, inputs // num_groups
    narrow_OS = scales_OS.astype(x_RI.dtype)
    scale_OI = lax.broadcast_in_dim(narrow_OS, shape_OSG, (0, 1)).reshape(
        values_OI.shape
    )
    y_RO = _products("oi,ri->or", values_OI.astype(x_RI.dtype) * scale_OI, x_RI).T
    if zeros_OS is None:
        return y_RO
    x_RSG = x_RI.astype(jnp.float32).reshape(-1, *shape_OSG[1:])
    offset_OS = zeros_OS.astype(jnp.float32) * narrow_OS.astype(jnp.float32)
    return y_RO - jnp.einsum(
        "rs,os->ro", x_RSG.sum(2), offset_OS, precision=lax.Precision.HIGHEST
    )


def quantized_rows_matmul_xla(
    values_OI: Num[Array, "O I"],
    scales_O1: Float[Array, "O 1"],
    x_RI: Num[Array, "R I"],
    x_scales_R1: Float[Array, "R 1"],
    out_dtype: DTypeLike,
) -> Float[Array, "R O"]:
    """See `api.quantized_rows_matmul`; sums are int32, or float32 ones of fp8."""
    is_int = jnp.issubdtype(values_OI.dtype, jnp.integer)
    num_rows = x_RI.shape[0]
    if num_rows < _LEAST_ROWS:
        x_RI = jnp.pad(x_RI, ((0, _LEAST_ROWS - num_rows), (0, 0)))
    sums_RO = jnp.einsum(
        "ri,oi->ro",
        x_RI,
        values_OI,
        preferred_element_type=jnp.int32 if is_int else jnp.float32,
    )
    sums_RO = sums_RO[:num_rows].astype(jnp.float32)
    scaled = sums_RO * (x_scales_R1 * scales_O1.T)
    return scaled.astype(out_dtype)


def _centred(
    values: Num[Array, "O S G"], zeros_OS: Int[Array, "O S"] | None, dtype: DTypeLike
) -> Float[Array, "O S G"]:
    """Exact in bfloat16, too: all are whole numbers under 256, or 8-bit floats."""
    if zeros_OS is None:
        return values.astype(dtype)
    return values.astype(dtype) - zeros_OS.astype(dtype)[..., None]


def _products(what: str, values: Array, x: Array) -> Array:
    return jnp.einsum(what, values, x, preferred_element_type=jnp.float32)
