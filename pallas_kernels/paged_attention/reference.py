"""The plain truth for paged attention: dense, float32, one row at a time, in numpy.

Slow on purpose: every faster implementation is compared with it.
"""

import numpy as np


def paged_attention_reference(
    q_BTKGH: np.ndarray,
    pools: tuple[np.ndarray, np.ndarray],
    layer: int,
    *,
    page_table_BM: np.ndarray,
    positions_BT: np.ndarray,
    context_len_B: np.ndarray,
) -> np.ndarray:
    """Same meaning as `api.paged_attention`, float32 in and out."""
    B, T, K, G, H = q_BTKGH.shape
    out = np.zeros((B, T, K, G, H), np.float32)
    for b in range(B):
        S = int(context_len_B[b])
        k_SKH, v_SKH = (
            np.concatenate([pool[layer, p] for p in page_table_BM[b]], axis=1)[:, :S]
            .transpose(1, 0, 2)
            .astype(np.float32)
            for pool in pools
        )
        for t in range(T):
            end = min(int(positions_BT[b, t]) + 1, S)
            if end <= 0:
                continue
            score = np.einsum("kgh,skh->kgs", q_BTKGH[b, t], k_SKH[:end]) * H**-0.5
            weight = np.exp(score - score.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            out[b, t] = np.einsum("kgs,skh->kgh", weight, v_SKH[:end])
    return out
