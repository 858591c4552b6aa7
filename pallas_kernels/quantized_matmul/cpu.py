"""Rows times quantized weights on a CPU through `cpu.cc`.

The bits are those of `row_matmul` with the dequantized weight, among any rows.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from headrace.pallas_kernels import native

_SOURCE = pathlib.Path(__file__).with_name("cpu.cc")
VALUE_TYPES = ("int8", "int4", "float8_e4m3fn")


def quantized_matmul_cpu(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: Float[Array, "R I"],
    num_valid_B: Int[Array, " B"],
) -> Float[Array, "R O"]:
    """See `api.quantized_matmul`.

    Raises:
      NotImplementedError: not served here; see `serves`.
    """
    name = values_OI.dtype.name
    if not serves(values_OI, scales_OS, x_RI):
        raise NotImplementedError(
            f"no CPU kernel for {x_RI.dtype} and {name} in {scales_OS.shape[1]} groups"
        )
    zeros = jnp.zeros((0, 0), jnp.int8) if zeros_OS is None else zeros_OS
    shape = (x_RI.shape[0], values_OI.shape[0])
    call = jax.ffi.ffi_call(_target(name), jax.ShapeDtypeStruct(shape, jnp.float32))
    valid = num_valid_B.astype(jnp.int32)
    return call(x_RI, values_OI, scales_OS, zeros.astype(jnp.int8), valid)


def serves(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    x_RI: Float[Array, "R I"],
) -> bool:
    """Whether there is a kernel for these shapes and types on this machine."""
    group = values_OI.shape[1] // scales_OS.shape[1]
    # Two int4 values share a byte, and a group begins at a whole one.
    is_even = values_OI.dtype != jnp.int4 or group % 2 == 0
    return bool(identity()) and x_RI.dtype == jnp.float32 and is_even


def identity() -> str:
    """Makes the kernels ready, and names what their machine code depends on.

    Returns:
      A hash; the empty string where plain XLA serves, without a C++ compiler.
    """
    return native.identity() if _is_registered() else ""


def _target(value_type: str) -> str:
    return f"headrace_quantized_matmul_{value_type}"


@functools.cache
def _is_registered() -> bool:
    library = native.load(_SOURCE)
    if library is None:
        return False
    for name in VALUE_TYPES:
        handler = jax.ffi.pycapsule(getattr(library, f"quantized_matmul_{name}"))
        jax.ffi.register_ffi_target(_target(name), handler, platform="cpu")
    return True
