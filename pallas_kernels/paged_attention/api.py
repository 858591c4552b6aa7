"""Paged attention: checks the arguments and chooses an implementation.

On GPUs of compute capability 9.0 the Mosaic kernels, on a CPU with a C++ compiler
`cpu.cc`, everywhere else plain XLA. Nobody outside this folder calls anything else in
it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.gpu_target import gpu_capability
from headrace.pallas_kernels.paged_attention import cpu, tuning
from headrace.pallas_kernels.paged_attention.loads import loaded_keys
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
    Pools,
)
from headrace.pallas_kernels.paged_attention.tuning import KernelShape, tuned_shapes
from headrace.pallas_kernels.paged_attention.xla import (
    KEY_BLOCK,
    paged_attention_xla,
)

__all__ = [
    "AttentionOptions", "Implementation", "KernelShape", "cpu_identity", "loaded_keys",
    "paged_attention", "tuned_shapes",
]  # fmt: skip
logger = logging.getLogger(__name__)

Implementation = Literal["mosaic_gpu", "cpu", "xla"]
_MAX_TREE = 32


def paged_attention(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: Pools,
    layer: int,
    *,
    page_table_BM: Int[Array, "B M"],
    positions_BT: Int[Array, "B T"],
    context_len_B: Int[Array, " B"],
    tree_mask_BT: Int[Array, "B T"] | None = None,
    sinks_KG: Float[Array, "K G"] | None = None,
    scales: tuple[Float[Array, "L P K C"], Float[Array, "L P K C"]] | None = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 (frozen)
    implementation: Implementation | None = None,
    interpret: Any = None,
) -> Float[Array, "B T K G H"]:
    """Attention of T query tokens per row over the row's pages.

    The keys of the queries themselves are already written. What each query sees, and
    the optional arrays, are described at `AttentionArrays`. A query at or past
    context_len[b] is padding: its output is finite and otherwise unspecified.

    Args:
      q_BTKGH: rotated queries, grouped by the kv head that they read.
      pools: key and value pages of one KV group, all layers.
      layer: index of the layer within the group.
      page_table_BM, positions_BT, context_len_B, tree_mask_BT, sinks_KG: see
        `AttentionArrays`.
      scales: of keys and values, where the pools are quantized.
      options: scale, window, soft cap.
      implementation: forces one; None chooses by device, dtype and shape, and says once
        in the log where a GPU gets plain XLA, and why.
      interpret: of `pallas_kernels.compat.interpreter`, to run "mosaic_gpu" on a CPU.

    Returns:
      The attention output in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, or a page size that does
        not divide 128.
      NotImplementedError: the forced implementation does not serve these arguments.
    """
    k_scales, v_scales = scales or (None, None)
    arrays = AttentionArrays(
        page_table_BM=page_table_BM,
        positions_BT=positions_BT,
        context_len_B=context_len_B,
        tree_mask_BT=tree_mask_BT,
        sinks_KG=sinks_KG,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    _check(q_BTKGH, pools, layer, arrays)
    rest = {"pools": pools, "layer": layer, "arrays": arrays, "options": options}
    if implementation is not None:
        return _forced(implementation, interpret)(q_BTKGH, **rest)
    choices = {}
    if (capability := gpu_capability()) is not None:
        reason = tuning.refusal(q_BTKGH, pools, arrays, options, capability)
        if reason is None:
            choices["cuda"] = functools.partial(_mosaic_gpu, **rest)
        else:
            _say_once(reason)
    elif arrays.is_simple and options.is_plain:
        _, _, _, C, H = pools[0].shape
        if cpu_identity(q_BTKGH.shape[3], H, C, pools[0].dtype.name):
            choices["cpu"] = functools.partial(cpu.paged_attention_cpu, **rest)
    plain = functools.partial(paged_attention_xla, **rest)
    if not choices:
        return plain(q_BTKGH)
    return jax.lax.platform_dependent(q_BTKGH, **choices, default=plain)


def cpu_identity(group: int, head_dim: int, page_size: int, dtype: str) -> str:
    """Makes the CPU's kernel ready, and names what its machine code depends on.

    Programs stored by an earlier process call the kernel by name: this registers it.

    Args:
      group: query heads per kv head.
      head_dim: their size.
      page_size: tokens per page.
      dtype: of the pools.

    Returns:
      A hash for the key of stored programs; the empty string where plain XLA serves.
    """
    if jax.default_backend() != "cpu":
        return ""
    return cpu.identity(group, head_dim, page_size, dtype)


def _forced(implementation: str, interpret: Any) -> Callable[..., Array]:
    known = {
        "mosaic_gpu": functools.partial(_mosaic_gpu, interpret=interpret),
        "cpu": cpu.paged_attention_cpu,
        "xla": paged_attention_xla,
    }
    if implementation not in known:
        raise ValueError(
            f"implementation must be one of {list(known)} or None, got "
            f"{implementation!r}"
        )
    return known[implementation]


def _mosaic_gpu(q_BTKGH: Array, **rest: Any) -> Array:
    # Loads Mosaic GPU, which a CPU has no use for.
    from headrace.pallas_kernels.paged_attention.mosaic_gpu import (
        paged_attention_mosaic,
    )

    return paged_attention_mosaic(q_BTKGH, **rest)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("plain XLA instead of the kernels for paged attention: %s", reason)


def _check(q_BTKGH: Array, pools: Pools, layer: int, arrays: AttentionArrays) -> None:
    """What can be told while tracing."""
    k_pages, v_pages = pools
    B, T, K, G, H = q_BTKGH.shape
    if k_pages.shape != v_pages.shape or k_pages.ndim != 5:
        raise ValueError(
            f"pools must be two [L, P, K, C, H] arrays of one shape, got "
            f"{k_pages.shape} and {v_pages.shape}"
        )
    _, _, pool_K, C, pool_H = k_pages.shape
    if (pool_K, pool_H) != (K, H):
        raise ValueError(
            f"queries with K {K}, H {H} do not fit pools with K {pool_K}, H {pool_H}"
        )
    if KEY_BLOCK % C:
        raise ValueError(f"the page size must divide {KEY_BLOCK}, got {C}")
    if not 0 <= layer < k_pages.shape[0]:
        raise ValueError(f"layer must lie in [0, {k_pages.shape[0] - 1}], got {layer}")
    wanted = {
        "page_table_BM": (B, arrays.page_table_BM.shape[-1]),
        "positions_BT": (B, T),
        "context_len_B": (B,),
        "tree_mask_BT": (B, T),
        "sinks_KG": (K, G),
        "k_scales": k_pages.shape[:4],
        "v_scales": k_pages.shape[:4],
    }
    for name, shape in wanted.items():
        value = getattr(arrays, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {value.shape}")
        is_index = name.endswith(("_BM", "_BT", "_B"))
        if value is not None and is_index and value.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {value.dtype}")
    if arrays.tree_mask_BT is not None and T > _MAX_TREE:
        raise ValueError(f"a tree has at most {_MAX_TREE} nodes, got {T}")
    is_narrow = k_pages.dtype.itemsize == 1
    if is_narrow != (arrays.k_scales is not None) or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"8-bit pools, and only they, need scales, got {k_pages.dtype} and "
            f"{v_pages.dtype} with {'no ' * (arrays.k_scales is None)}scales"
        )
    if is_narrow and C < 32:
        raise ValueError(f"8-bit pools need pages of at least 32 tokens, got {C}")
