"""Paged attention in plain XLA: runs on every device, the CPU first of all.

Loops over fixed absolute blocks of 128 keys with an online softmax in float32. A block
that is masked for a row is an exact no-op for it, so a row's bits do not depend on its
neighbours' lengths. On a CPU rows go in small groups of similar context, each up to its
own longest: a ragged batch costs about what it holds, and gathered blocks stay in
cache. Elsewhere all rows go together, up to the longest context of the call.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
    Pools,
)

KEY_BLOCK = 128
_MASKED = -1e30


class _Shared(NamedTuple):
    """What all rows read."""

    pools: Pools
    scales: tuple[Array | None, Array | None]
    sinks_KG: Array | None


class _Rows(NamedTuple):
    q_BTKGH: Float[Array, "B T K G H"]
    table_BM: Int[Array, "B M"]
    positions_BT: Int[Array, "B T"]
    context_len_B: Int[Array, " B"]
    tree_mask_BT: Int[Array, "B T"] | None


def paged_attention_xla(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: Pools,
    layer: int,
    arrays: AttentionArrays,
    options: AttentionOptions,
) -> Float[Array, "B T K G H"]:
    """See `api.paged_attention`, whose arguments these are, already checked."""
    shared = _Shared(pools, (arrays.k_scales, arrays.v_scales), arrays.sinks_KG)
    table_BM = _pad_to_blocks(arrays.page_table_BM, KEY_BLOCK // pools[0].shape[3])
    rows = _Rows(
        q_BTKGH,
        table_BM,
        arrays.positions_BT,
        arrays.context_len_B,
        arrays.tree_mask_BT,
    )
    together = functools.partial(_attend_rows, layer=layer, options=options)
    if rows.positions_BT.shape[0] == 1:
        return together(shared, rows)

    return jax.lax.platform_dependent(
        shared,
        rows,
        cpu=functools.partial(_attend_groups, layer=layer, options=options),
        default=together,
    )


def _attend_groups(
    shared: _Shared, rows: _Rows, *, layer: int, options: AttentionOptions
) -> Float[Array, "..."]:
    """Rows in groups of similar context, the longest first; chunks one by one.

    Of two CPU cores, 64 ragged decode rows in sorted groups of 8 took 0.6 of the time
    of one by one, and 0.8 of that of unsorted groups. In a small bucket a lone row is
    likely and pays for its whole group: 4. Groups of 1 and 2 round otherwise there.
    """
    B, T = rows.positions_BT.shape
    size = 1 if T > 1 else (8 if B >= 16 else 4)
    spare = -B % size
    order_B = jnp.argsort(-jnp.pad(rows.context_len_B, (0, spare)))

    def regroup(leaf: Array) -> Array:
        leaf = jnp.pad(leaf, ((0, spare), *((0, 0),) * (leaf.ndim - 1)))
        return leaf[order_B].reshape(-1, size, *leaf.shape[1:])

    attend = functools.partial(_attend_rows, shared, layer=layer, options=options)
    out = jax.lax.map(attend, jax.tree.map(regroup, rows))
    out = out.reshape(B + spare, *rows.q_BTKGH.shape[1:])
    return out[jnp.argsort(order_B)[:B]]


def _attend_rows(
    shared: _Shared, rows: _Rows, *, layer: int, options: AttentionOptions
) -> Float[Array, "B T K G H"]:
    """Rows together, over the blocks of their longest context.

    Source: Milakov and Gimelshein 2018, algorithm 3 (online softmax).
    """
    q_BTKGH, table_BM, _, context_len_B, _ = rows
    B, T, K, G, H = q_BTKGH.shape
    pages_per_block = KEY_BLOCK // shared.pools[0].shape[3]
    q_BKRH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    q_BKRH = q_BKRH.astype(jnp.float32) * options.scale_of(H)

    def block(i: Int[Array, ""], carry: tuple) -> tuple:
        top_BKR, total_BKR, out_BKRH = carry
        start = (jnp.int32(0), i * pages_per_block)
        ids_BJ = jax.lax.dynamic_slice(table_BM, start, (B, pages_per_block))
        k_BKSH, v_BKSH = (
            _gather(pool, scale, layer, ids_BJ)
            for pool, scale in zip(shared.pools, shared.scales, strict=True)
        )
        key_S = i * KEY_BLOCK + jnp.arange(KEY_BLOCK, dtype=jnp.int32)
        seen_BRS = jnp.repeat(_seen(rows, key_S, options), G, axis=1)
        # Rows of a reused page past the context may hold anything, NaN included.
        held_BS = key_S < context_len_B[:, None]
        v_BKSH = jnp.where(held_BS[:, None, :, None], v_BKSH, 0)
        score = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, k_BKSH)
        if options.soft_cap is not None:
            score = options.soft_cap * jnp.tanh(score / options.soft_cap)
        score = jnp.where(seen_BRS[:, None], score, _MASKED)
        new_top_BKR = jnp.maximum(top_BKR, score.max(-1))
        shrink_BKR = jnp.exp(top_BKR - new_top_BKR)
        weight = jnp.exp(score - new_top_BKR[..., None])
        weight = jnp.where(seen_BRS[:, None], weight, 0)
        total_BKR = total_BKR * shrink_BKR + weight.sum(-1)
        gain = jnp.einsum("bkrs,bksh->bkrh", weight, v_BKSH)
        return new_top_BKR, total_BKR, out_BKRH * shrink_BKR[..., None] + gain

    start = _start(shared.sinks_KG, (B, K, T * G, H))
    num_blocks = (context_len_B.max() + KEY_BLOCK - 1) // KEY_BLOCK
    _, total_BKR, out_BKRH = jax.lax.fori_loop(jnp.int32(0), num_blocks, block, start)
    # A padded row has seen no key; it becomes zero, not 0 / 0.
    out_BKRH = out_BKRH / jnp.where(total_BKR > 0, total_BKR, 1)[..., None]
    out = out_BKRH.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4)
    return out.astype(q_BTKGH.dtype)


def _seen(rows: _Rows, key_S: Int[Array, " S"], options: AttentionOptions) -> Array:
    """[B, T, S]: which keys each query sees; see AttentionArrays."""
    # Never past the context.
    limit_BT = jnp.minimum(rows.positions_BT, rows.context_len_B[:, None] - 1)
    seen_BTS = key_S <= limit_BT[..., None]
    if rows.tree_mask_BT is not None:
        node_BS = key_S - rows.positions_BT[:, :1]
        bit_BTS = rows.tree_mask_BT[..., None] >> jnp.clip(node_BS, 0, 31)[:, None, :]
        in_tree_BS = (node_BS < rows.positions_BT.shape[1]) & (
            key_S < rows.context_len_B[:, None]
        )
        of_tree_BTS = (bit_BTS & 1 == 1) & in_tree_BS[:, None, :]
        seen_BTS = jnp.where(node_BS[:, None, :] < 0, seen_BTS, of_tree_BTS)
    if options.window is not None:
        seen_BTS &= key_S > rows.positions_BT[..., None] - options.window
    return seen_BTS


def _start(sinks_KG: Array | None, shape: tuple[int, int, int, int]) -> tuple:
    """Maximum, total and output before the first key: a sink has been seen already."""
    B, K, R, _ = shape
    out_BKRH = jnp.zeros(shape, jnp.float32)
    if sinks_KG is None:
        top_BKR = jnp.full((B, K, R), _MASKED, jnp.float32)
        return top_BKR, jnp.zeros((B, K, R), jnp.float32), out_BKRH
    sinks_KR = jnp.tile(sinks_KG.astype(jnp.float32), (1, R // sinks_KG.shape[1]))
    top_BKR = jnp.broadcast_to(sinks_KR, (B, K, R))
    return top_BKR, jnp.ones((B, K, R), jnp.float32), out_BKRH


def _pad_to_blocks(
    page_table_BM: Int[Array, "B M"], pages_per_block: int
) -> Int[Array, "B M"]:
    short = -page_table_BM.shape[1] % pages_per_block
    return jnp.pad(page_table_BM, ((0, 0), (0, short)))


def _gather(
    pool_LPKCH: Float[Array, "L P K C H"],
    scale_LPKC: Float[Array, "L P K C"] | None,
    layer: int,
    ids_BJ: Int[Array, "B J"],
) -> Float[Array, "B K S H"]:
    """One block of keys or values, [B, K, 128, H] in float32."""
    B, J = ids_BJ.shape
    P, K, C, H = pool_LPKCH.shape[1:]
    ids_BJ = jnp.where((ids_BJ >= 0) & (ids_BJ < P), ids_BJ, 0)
    pages_BJKCH = pool_LPKCH.at[layer, ids_BJ].get(mode="promise_in_bounds")
    if scale_LPKC is not None:
        scale_BJKC = scale_LPKC.at[layer, ids_BJ].get(mode="promise_in_bounds")
        pages_BJKCH = pages_BJKCH.astype(jnp.float32) * scale_BJKC[..., None]
    block = pages_BJKCH.transpose(0, 2, 1, 3, 4).reshape(B, K, J * C, H)
    return block.astype(jnp.float32)
