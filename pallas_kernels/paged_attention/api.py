"""Paged attention: checks the arguments and chooses an implementation.

Today there is one, plain XLA. Nobody outside this folder calls anything else in it.
"""

from jaxtyping import Array, Float, Int

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

    The keys of the queries themselves are already written. Query t of row b sees
    the keys at positions 0 .. min(positions[b, t], context_len[b] - 1).

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
    return paged_attention_xla(
        q_BTKGH,
        pools,
        layer,
        page_table_BM=page_table_BM,
        positions_BT=positions_BT,
        context_len_B=context_len_B,
    )
