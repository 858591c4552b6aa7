"""Paged attention: checks the arguments and chooses an implementation.

On a CPU with a C++ compiler that is `cpu.cc`, else plain XLA. Nobody outside this
folder calls anything else in it.
"""

import functools

import jax
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.paged_attention import cpu
from headrace.pallas_kernels.paged_attention.xla import (
    KEY_BLOCK,
    paged_attention_xla,
)


def paged_attention(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: tuple[Float[Array, "L P K C H"], Float[Array, "L P K C H"]],
    layer: int,
    *,
    page_table_BM: Int[Array, "B M"],
    positions_BT: Int[Array, "B T"],
    context_len_B: Int[Array, " B"],
) -> Float[Array, "B T K G H"]:
    """Causal attention of T query tokens per row over the row's pages.

    The keys of the queries themselves are already written. Query t of row b sees the
    keys at positions 0 .. positions[b, t]. One at or past context_len[b] is padding:
    its output is finite and otherwise unspecified.

    Args:
      q_BTKGH: rotated queries, grouped by the kv head that they read.
      pools: key and value pages of one KV group, all layers.
      layer: index of the layer within the group.
      page_table_BM: page ids in order of position; unused entries are 0.
      positions_BT: absolute position of each query.
      context_len_B: valid keys of each row; a row with 0 gives zeros.

    Returns:
      The attention output in q's dtype; softmax and sums are float32.

    Raises:
      ValueError: the pools do not fit the queries, or the page size does not
        divide 128.
    """
    k_pages, v_pages = pools
    K, H = q_BTKGH.shape[2], q_BTKGH.shape[4]
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
    rest = {
        "pools": pools,
        "layer": layer,
        "page_table_BM": page_table_BM,
        "positions_BT": positions_BT,
        "context_len_B": context_len_B,
    }
    plain = functools.partial(paged_attention_xla, **rest)
    if not cpu_identity(q_BTKGH.shape[3], H, C, k_pages.dtype.name):
        return plain(q_BTKGH)
    native = functools.partial(cpu.paged_attention_cpu, **rest)
    return jax.lax.platform_dependent(q_BTKGH, cpu=native, default=plain)


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
