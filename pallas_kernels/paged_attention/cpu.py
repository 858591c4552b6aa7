"""Paged attention on a CPU through `cpu.cc`, which reads the pages in place."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from headrace.pallas_kernels import native
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
    Pools,
)

_SOURCE = pathlib.Path(__file__).with_name("cpu.cc")
_LANES, _MAX_GROUP, _MAX_HEAD_DIM = 16, 64, 512


def paged_attention_cpu(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: Pools,
    layer: int,
    arrays: AttentionArrays,
    options: AttentionOptions,
) -> Float[Array, "B T K G H"]:
    """See `api.paged_attention`, whose arguments these are, already checked.

    A query's bits depend on itself, its pages and its limit alone: not on other rows,
    nor on T.

    Raises:
      NotImplementedError: not served here; see `identity`.
    """
    G, H = q_BTKGH.shape[3:]
    name = _target(G, H, pools[0].shape[3], pools[0].dtype.name)
    if name is None or not (arrays.is_simple and options.is_plain):
        raise NotImplementedError("no CPU kernel of this kind on this machine")
    call = jax.ffi.ffi_call(
        name,
        jax.ShapeDtypeStruct(q_BTKGH.shape, jnp.float32),
    )
    indices = (a.astype(jnp.int32) for a in arrays[:3] if a is not None)
    no_scales = jnp.zeros((0, 0, 0, 0), jnp.float32)
    scales = (
        no_scales if one is None else one for one in (arrays.k_scales, arrays.v_scales)
    )
    rows = q_BTKGH.astype(jnp.float32)
    out = call(rows, *pools, *indices, *scales, layer=np.int64(layer))
    return out.astype(q_BTKGH.dtype)


def identity(group: int, head_dim: int, page_size: int, dtype: str) -> str:
    """Makes the kernel ready, and names what its machine code depends on.

    Args:
      group: query heads per kv head.
      head_dim: their size.
      page_size: tokens per page.
      dtype: of the pools.

    Returns:
      A hash; the empty string where plain XLA serves: no C++ compiler works here, or a
      type or a size is one that the kernel lacks.
    """
    name = _target(group, head_dim, page_size, dtype)
    return native.identity() if name else ""


@functools.cache
def _target(group: int, head_dim: int, page_size: int, dtype: str) -> str | None:
    """Name under which XLA knows the kernel for these sizes; None without one."""
    if (
        dtype not in ("float32", "bfloat16", "int8", "float8_e4m3fn")
        or group > _MAX_GROUP
        or head_dim > _MAX_HEAD_DIM
        or head_dim % _LANES
        or page_size % _LANES
    ):
        return None
    library = native.load(_SOURCE, (("HEADRACE_HEAD_DIM", head_dim),))
    if library is None:
        return None
    name = f"headrace_paged_attention_{dtype}_{head_dim}"
    handler = getattr(library, f"paged_attention_{dtype}")
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name
