"""The plain truth for paged attention: dense, float32, one query at a time, in numpy.

Slow on purpose: every faster implementation is compared with it.
"""

import numpy as np

from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
)


def paged_attention_reference(
    q_BTKGH: np.ndarray,
    pools: tuple[np.ndarray, np.ndarray],
    layer: int,
    arrays: AttentionArrays,
    options: AttentionOptions,
) -> np.ndarray:
    """Same meaning as `api.paged_attention`, with numpy arrays, float32 in and out."""
    B, T, K, G, H = q_BTKGH.shape
    out = np.zeros((B, T, K, G, H), np.float32)
    scales = (arrays.k_scales, arrays.v_scales)
    for b in range(B):
        k_SKH, v_SKH = (
            _keys(pool, scale, layer, arrays, b)
            for pool, scale in zip(pools, scales, strict=True)
        )
        for t in range(T):
            seen = _seen(arrays, options, b, t)
            if not seen.size:
                continue
            q_KGH = q_BTKGH[b, t].astype(np.float32)
            score = np.einsum("kgh,skh->kgs", q_KGH, k_SKH[seen])
            score *= options.scale_of(H)
            if options.soft_cap is not None:
                score = options.soft_cap * np.tanh(score / options.soft_cap)
            top = score.max(-1, keepdims=True)
            weight = np.exp(score - top)
            total = weight.sum(-1, keepdims=True)
            if arrays.sinks_KG is not None:
                total += np.exp(arrays.sinks_KG[..., None] - top)
            out[b, t] = np.einsum("kgs,skh->kgh", weight / total, v_SKH[seen])
    return out


def _keys(
    pool_LPKCH: np.ndarray,
    scale_LPKC: np.ndarray | None,
    layer: int,
    arrays: AttentionArrays,
    row: int,
) -> np.ndarray:
    """The row's keys or values [S, K, H], S its context."""
    S, C = int(arrays.context_len_B[row]), pool_LPKCH.shape[3]
    ids = arrays.page_table_BM[row][: -(-S // C)]
    pages_JKCH = pool_LPKCH[layer, ids].astype(np.float32)
    if scale_LPKC is not None:
        pages_JKCH = pages_JKCH * scale_LPKC[layer, ids][..., None]
    J, K, C, H = pages_JKCH.shape
    return pages_JKCH.transpose(0, 2, 1, 3).reshape(J * C, K, H)[:S]


def _seen(
    arrays: AttentionArrays, options: AttentionOptions, row: int, token: int
) -> np.ndarray:
    """Positions of the keys that a query sees."""
    key_S = np.arange(int(arrays.context_len_B[row]))
    position = int(arrays.positions_BT[row, token])
    first = int(arrays.positions_BT[row, 0])
    if arrays.tree_mask_BT is None:
        sees_S = key_S <= position
    else:
        mask = int(arrays.tree_mask_BT[row, token]) % 2**32
        num_nodes = arrays.positions_BT.shape[1]
        nodes = [j for j in range(num_nodes) if mask >> j & 1]
        sees_S = (key_S < first) & (key_S <= position) | np.isin(key_S - first, nodes)
    if options.window is not None:
        sees_S &= key_S > position - options.window
    return key_S[sees_S]
