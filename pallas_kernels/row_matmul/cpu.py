"""Rows times a weight on a CPU through `cpu.cc`: the same bits among any rows."""

import functools
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels import native

_SOURCE = pathlib.Path(__file__).with_name("cpu.cc")
_NAME = "headrace_row_matmul_float32"


def row_matmul_cpu(
    w_OI: Float[Array, "O I"],
    x_RI: Float[Array, "R I"],
    num_valid_B: Int[Array, " B"],
) -> Float[Array, "R O"]:
    """See `api.row_matmul`. An output's bits depend on its row and its weights alone.

    Raises:
      NotImplementedError: not served here; see `identity`.
    """
    if not identity(w_OI.dtype.name) or x_RI.dtype != w_OI.dtype:
        raise NotImplementedError(f"no CPU kernel for {x_RI.dtype} and {w_OI.dtype}")
    shape = (x_RI.shape[0], w_OI.shape[0])
    call = jax.ffi.ffi_call(_NAME, jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(x_RI, w_OI, num_valid_B.astype(jnp.int32))


def identity(dtype: str) -> str:
    """Makes the kernel ready, and names what its machine code depends on.

    Returns:
      A hash; the empty string where plain XLA serves: no C++ compiler works here, or
      the dtype is not float32.
    """
    return native.identity() if dtype == "float32" and _is_registered() else ""


@functools.cache
def _is_registered() -> bool:
    library = native.load(_SOURCE)
    if library is None:
        return False
    handler = jax.ffi.pycapsule(library.row_matmul_float32)
    jax.ffi.register_ffi_target(_NAME, handler, platform="cpu")
    return True
