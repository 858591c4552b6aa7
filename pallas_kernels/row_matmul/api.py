"""Rows times a weight: checks the arguments and chooses an implementation.

On a CPU with a C++ compiler that is `cpu.cc`, else plain XLA. Nobody outside this
folder calls anything else in it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.row_groups import valid_rows
from headrace.pallas_kernels.row_matmul import cpu


def row_matmul(
    w_OI: Float[Array, "O I"],
    x_RI: Float[Array, "R I"],
    num_valid_B: Int[Array, " B"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "R O"]:
    """Multiplies rows by a weight stored (out, in).

    Args:
      w_OI: the weight; converted to x's dtype where it differs.
      x_RI: the rows.
      num_valid_B: where the rows come in B groups of one size, how many at the start
        of each group count; None: all.
      out_dtype: of the result, to which the sums are rounded once; None is x's.

    Returns:
      `x @ w.T`; rows that do not count are unspecified, and finite where x and w are.

    Raises:
      ValueError: the inner sizes differ, or the rows are not a multiple of B.
    """
    if w_OI.ndim != 2 or x_RI.ndim != 2 or w_OI.shape[1] != x_RI.shape[1]:
        raise ValueError(f"rows {x_RI.shape} do not fit a weight of {w_OI.shape}")
    num_valid_B = valid_rows(x_RI.shape[0], num_valid_B)
    out_dtype = jnp.dtype(out_dtype or x_RI.dtype)
    plain = functools.partial(_plain, out_dtype=out_dtype)
    is_one_dtype = w_OI.dtype == x_RI.dtype == out_dtype
    if not cpu_identity(w_OI.dtype.name) or not is_one_dtype:
        return plain(w_OI, x_RI)
    return jax.lax.platform_dependent(
        w_OI, x_RI, num_valid_B, cpu=cpu.row_matmul_cpu, default=plain
    )


def cpu_identity(dtype: str) -> str:
    """Makes the CPU's kernel ready, and names what its machine code depends on.

    Programs stored by an earlier process call the kernel by name: this registers it.

    Args:
      dtype: of rows and weight.

    Returns:
      A hash for the key of stored programs; the empty string where plain XLA serves.
    """
    return cpu.identity(dtype) if jax.default_backend() == "cpu" else ""


def _plain(
    w_OI: Float[Array, "O I"],
    x_RI: Float[Array, "R I"],
    *_: Array,
    out_dtype: jnp.dtype,
) -> Float[Array, "R O"]:
    # On a CPU this runs at memory speed for one row, where `x @ w.T` falls to a
    # fifteenth of it; on a GPU it is the same GEMM.
    w_OI = w_OI.astype(x_RI.dtype)
    return jnp.matmul(w_OI, x_RI.T, preferred_element_type=out_dtype).T
