"""What differs between jax versions in Mosaic GPU; kernels go through here.

Tried with jax 0.11.2 and 0.12.0.1. Importing this loads Mosaic GPU (half a second), so
only files of kernels do; `gpu_target.py` says which of them a machine can run.
"""

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu


def swizzled_smem(shape: tuple[int, ...], dtype: Any, most_bytes: int = 128) -> Any:
    """Shared memory tiled and swizzled as TMA and wgmma want it.

    The last axis must be 32, 64 or a multiple of 128 bytes; it can be cut between
    tiles of that width, or of `most_bytes`, which is one of these, if that is less.
    """
    bits = 4 if jnp.dtype(dtype) == jnp.int4 else jnp.dtype(dtype).itemsize * 8
    width = min(most_bytes, shape[-1] * bits // 8)  # bytes
    tiling = plgpu.TilingTransform((8, width * 8 // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def store(ref: Any, value: Any) -> None:
    """Registers to global memory, in rows that may be short.

    jax 0.12 refuses rows under 128 bytes unless told that the store need not be one
    wide transaction; 0.11 has no such function.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def interpreter(*, detect_races: bool = True) -> Any:
    """For `plgpu.kernel(interpret=...)`: runs on a CPU; shared memory begins as NaN."""
    return plgpu.InterpretGPUParams(detect_races=detect_races)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Raises at the end where an interpreted kernel raced.

    jax 0.12 raises by itself in the kernel, 0.11 only writes it down.

    Raises:
      RuntimeError: a race was found.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    yield
    found = gpu_callbacks.get_races()
    if found is not None and found.races_found:
        raise RuntimeError("the kernel reads or writes memory without an order")


@contextlib.contextmanager
def counted_copies() -> Iterator[collections.Counter[tuple[int, ...]]]:
    """Counts what interpreted kernels copy into shared memory: shape -> copies.

    Kernels must be traced within it.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    counter: collections.Counter[tuple[int, ...]] = collections.Counter()
    real = gpu_callbacks.copy_gmem_to_smem

    def counting(**arguments: Any) -> Any:
        key = gpu_callbacks.HostAllocationKey.from_array(
            arguments["src_allocation_key_as_array"]
        )
        transforms = gpu_callbacks._remove_noop_transforms(arguments["src_transforms"])
        memory = gpu_callbacks._get_shared_memory()
        access = memory.access(key, jax.tree.map(int, transforms))
        counter[tuple(size for size in access.shape if size != 1)] += 1
        return real(**arguments)

    gpu_callbacks.copy_gmem_to_smem = counting
    try:
        yield counter
    finally:
        gpu_callbacks.copy_gmem_to_smem = real


def reset_interpreter() -> None:
    """Must follow an error inside an interpreted kernel, before the next one runs."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


@contextlib.contextmanager
def lowering_for(capability: tuple[int, int]) -> Iterator[None]:
    """Mosaic lowers for this GPU; without a device it takes sm_90 for granted."""
    real = mosaic_utils._infer_arch
    mosaic_utils._infer_arch = lambda: capability
    try:
        yield
    finally:
        mosaic_utils._infer_arch = real


def kernel_options(interpret: Any, **compiler: Any) -> dict[str, Any]:
    """Options of `plgpu.kernel` that all kernels share."""
    params = plgpu.CompilerParams(approx_math=True, **compiler)
    options: dict[str, Any] = {"compiler_params": params}
    return options if interpret is None else options | {"interpret": interpret}


def int32_input(value: int | jax.Array) -> jax.Array:
    """A number that a kernel reads from memory: it is compiled once for all values."""
    return jnp.asarray(value, jnp.int32).reshape(1)
