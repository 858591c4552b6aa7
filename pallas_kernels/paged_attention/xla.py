"""Paged attention in plain XLA: runs on every device, the CPU first of all.

Loops over fixed absolute blocks of 128 keys with an online softmax in float32. A block
that is masked for a row is an exact no-op for it, so a row's bits do not depend on its
neighbours' lengths. Rows go in groups of fixed size, each up to its own longest
context: ragged batches then cost what they hold, and a gathered block stays in cache.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEY_BLOCK = 128
_MASKED = -1e30
# Decode rows per group: on two CPU cores 64 ragged rows took half the time of one
# group of 64. A fixed size keeps the products, and so the bits, those of any bucket.
_DECODE_GROUP = 4


def paged_attention_xla(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: tuple[Float[Array, "L P K C H"], Float[Array, "L P K C H"]],
    layer: int,
    *,
    page_table_BM: Int[Array, "B M"],
    positions_BT: Int[Array, "B T"],
    context_len_B: Int[Array, " B"],
) -> Float[Array, "B T K G H"]:
    """See `api.paged_attention`, whose arguments these are, already checked."""
    B, T = positions_BT.shape
    table_BM = _pad_to_blocks(page_table_BM, KEY_BLOCK // pools[0].shape[3])
    attend = functools.partial(_attend_rows, pools, layer)
    rows = (q_BTKGH, table_BM, positions_BT, context_len_B)
    size = _DECODE_GROUP if T == 1 else 1
    if B <= size or B % size:
        return attend(rows)
    groups = jax.tree.map(lambda a: a.reshape(B // size, size, *a.shape[1:]), rows)
    return jax.lax.map(attend, groups).reshape(q_BTKGH.shape)


def _attend_rows(
    pools: tuple[Float[Array, "L P K C H"], Float[Array, "L P K C H"]],
    layer: int,
    rows: tuple[
        Float[Array, "B T K G H"],
        Int[Array, "B M"],
        Int[Array, "B T"],
        Int[Array, " B"],
    ],
) -> Float[Array, "B T K G H"]:
    """One group of rows, over the blocks of its longest context.

    Source: Milakov and Gimelshein 2018, algorithm 3 (online softmax).
    """
    q_BTKGH, table_BM, positions_BT, context_len_B = rows
    B, T, K, G, H = q_BTKGH.shape
    pages_per_block = KEY_BLOCK // pools[0].shape[3]
    q_BKRH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    q_BKRH = q_BKRH.astype(jnp.float32) * (H**-0.5)
    # The last key that row r may see: its own position, and never past the context.
    limit_BT = jnp.minimum(positions_BT, context_len_B[:, None] - 1)
    limit_BR = jnp.repeat(limit_BT, G, axis=1)

    def block(i: Int[Array, ""], carry: tuple) -> tuple:
        top_BKR, total_BKR, out_BKRH = carry
        start = (0, i * pages_per_block)
        ids_BJ = jax.lax.dynamic_slice(table_BM, start, (B, pages_per_block))
        k_BKSH, v_BKSH = (_gather(pool, layer, ids_BJ) for pool in pools)
        key_S = i * KEY_BLOCK + jnp.arange(KEY_BLOCK)
        seen_BRS = key_S <= limit_BR[..., None]
        # Rows of a reused page past the context may hold anything, NaN included.
        held_BS = key_S < context_len_B[:, None]
        v_BKSH = jnp.where(held_BS[:, None, :, None], v_BKSH, 0)
        score = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH)
        score = jnp.where(seen_BRS[:, None], score, _MASKED)
        new_top_BKR = jnp.maximum(top_BKR, score.max(-1))
        shrink_BKR = jnp.exp(top_BKR - new_top_BKR)
        weight = jnp.exp(score - new_top_BKR[..., None])
        weight = jnp.where(seen_BRS[:, None], weight, 0)
        total_BKR = total_BKR * shrink_BKR + weight.sum(-1)
        gain = jnp.einsum("bkrs,bksh->bkrh", weight, v_BKSH)
        return new_top_BKR, total_BKR, out_BKRH * shrink_BKR[..., None] + gain

    shape = (B, K, T * G)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, H)))
    num_blocks = (context_len_B.max() + KEY_BLOCK - 1) // KEY_BLOCK
    _, total_BKR, out_BKRH = jax.lax.fori_loop(0, num_blocks, block, start)
    # A padded row has seen no key; it becomes zero, not 0 / 0.
    out_BKRH = out_BKRH / jnp.where(total_BKR > 0, total_BKR, 1)[..., None]
    out = out_BKRH.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4)
    return out.astype(q_BTKGH.dtype)


def _pad_to_blocks(
    page_table_BM: Int[Array, "B M"], pages_per_block: int
) -> Int[Array, "B M"]:
    short = -page_table_BM.shape[1] % pages_per_block
    return jnp.pad(page_table_BM, ((0, 0), (0, short)))


def _gather(
    pool_LPKCH: Float[Array, "L P K C H"], layer: int, ids_BJ: Int[Array, "B J"]
) -> Float[Array, "B K S H"]:
    """One block of keys or values, [B, K, 128, H] in float32."""
    B, J = ids_BJ.shape
    K, C, H = pool_LPKCH.shape[2:]
    pages_BJKCH = pool_LPKCH.at[layer, ids_BJ].get(mode="promise_in_bounds")
    block = pages_BJKCH.transpose(0, 2, 1, 3, 4).reshape(B, K, J * C, H)
    return block.astype(jnp.float32)
