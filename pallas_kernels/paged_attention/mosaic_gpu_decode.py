"""Paged attention of up to eight query tokens a row, for GPUs with wgmma (sm_90).

One program per (row, kv head, split of `split` keys). A producer warpgroup reads page
ids from the table in memory and loads pages by TMA into a ring of tiles of 64 keys; a
consumer warpgroup multiplies. Products are transposed: keys (scores) and head dim
(values) lie on the 64-row side of wgmma, the queries of the kv head on its narrow side,
so no row of it is wasted. `mosaic_gpu_merge.py` folds the splits. A split is fixed, so
a row's bits depend on the row alone.

    scores  x[key, query] = K[key, :] . q[query, :]
    online softmax over keys, per query: maximum m, total l
    output  acc[head dim, query] = V[:, head dim]^T p[key, query]

Rules for review: the interpreter cannot see that they are broken.
1. A slot of the ring is released only after the accumulator was read (`acc[...]` waits
   for wgmma), never between the issue of a product and its wait.
2. `commit_smem` stands between plain stores to shared memory and the wgmma that reads
   them, and between plain reads of a slot and its release to TMA.
Source: Dao 2023 (FlashAttention-2), Milakov and Gimelshein 2018 (online softmax), Kwon
et al. 2023 (pages).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    MASKED,
    NARROW_LAYOUT,
    base2_scores,
    cleaned,
    earliest_key,
    load_scale,
    per_query,
    widened,
)
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
    Pools,
)
from headrace.pallas_kernels.paged_attention.tuning import TILE, DecodeTuning

_CONSUMER, _PRODUCER = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is known while tracing.

    Attributes:
      T, G: query tokens of a row, heads per kv head; row r of N is token r // G.
      N: T * G, padded to a multiple of 8.
      C, H: tokens of a page, head dim.
      is_narrow: pools hold 8-bit numbers with scales.
      has_tree: what a query sees of the others follows from a mask.
    """

    T: int
    G: int
    N: int
    C: int
    H: int
    is_narrow: bool
    has_tree: bool
    options: AttentionOptions
    tuning: DecodeTuning

    @property
    def pages(self) -> int:
        """Of a tile."""
        return TILE // self.C


@dataclasses.dataclass(frozen=True)
class _Live:
    """The tiles [first, first + count) that this program goes through, and its row."""

    row: Array
    head: Array
    first: Array
    count: Array
    context_len: Array
    start: Array


def paged_decode_mosaic(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: Pools,
    layer: int | Array,
    arrays: AttentionArrays,
    options: AttentionOptions,
    *,
    tuning: DecodeTuning,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Partial outputs of each split; those of splits without keys are never written.

    Args:
      q_BTKGH: bfloat16, T * G at most 64.
      pools, layer, arrays, options: see `api.paged_attention`; ids in the table must
        lie in the pool.
      tuning: block sizes.
      interpret: see `compat.interpreter`.

    Returns:
      acc [S, B, K, H, N], the maxima m [S, B, K, N] in powers of two, and the totals l
      [S, B, K, N], float32; N is T * G padded to 8.
    """
    B, T, K, G, H = q_BTKGH.shape
    C = pools[0].shape[3]
    sizes = _Sizes(
        T=T,
        G=G,
        N=-(-T * G // 8) * 8,
        C=C,
        H=H,
        is_narrow=pools[0].dtype.itemsize == 1,
        has_tree=arrays.tree_mask_BT is not None,
        options=options,
        tuning=tuning,
    )
    table_BM = arrays.page_table_BM
    table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % sizes.pages)))
    S = -(-table_BM.shape[1] * C // tuning.split)
    out = jax.ShapeDtypeStruct((S, B, K, H, sizes.N), jnp.float32)
    total = jax.ShapeDtypeStruct((S, B, K, sizes.N), jnp.float32)
    operands = {
        "q": _rows(q_BTKGH, sizes.N),
        "k": pools[0],
        "v": pools[1],
        "table": table_BM,
        "context_len": arrays.context_len_B,
        "start": arrays.positions_BT[:, 0],
        "layer": compat.int32_input(layer),
    }
    if sizes.is_narrow:
        operands |= {"k_scale": arrays.k_scales, "v_scale": arrays.v_scales}
    if sizes.has_tree:
        operands |= {
            "tree": _per_row(arrays.tree_mask_BT, sizes),
            "position": _per_row(arrays.positions_BT, sizes),
        }
    scratch = _scratch(sizes, pools[0].dtype)
    names = [*operands, "acc", "m", "l", *scratch]

    def body(*refs: Any) -> None:
        _program(sizes, dict(zip(names, refs, strict=True)))

    kernel = plgpu.kernel(
        body,
        out_type=(out, total, total),
        grid=(B, K, S),
        grid_names=("row", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        kernel_name="paged_decode",
        **compat.kernel_options(interpret),
    )
    return kernel(*operands.values())


def _rows(q_BTKGH: Array, num_rows: int) -> Float[Array, "B K N H"]:
    B, T, K, G, H = q_BTKGH.shape
    q_BKRH = q_BTKGH.transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    return jnp.pad(q_BKRH, ((0, 0), (0, 0), (0, num_rows - T * G), (0, 0)))


def _per_row(value_BT: Array | None, sizes: _Sizes) -> Array:
    """[B, N] of what is known per query token."""
    assert value_BT is not None
    value_BR = jnp.repeat(value_BT, sizes.G, axis=1)
    return jnp.pad(value_BR, ((0, 0), (0, sizes.N - value_BR.shape[1])))


def _scratch(sizes: _Sizes, pool_dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    N, H, bf16 = sizes.N, sizes.H, jnp.bfloat16
    stages = sizes.tuning.stages
    tile = compat.swizzled_smem((stages, TILE, H), pool_dtype)
    loads = sizes.pages * (2 if sizes.is_narrow else 1)
    arrived = plgpu.Barrier(num_arrivals=loads, num_barriers=stages)
    free = plgpu.Barrier(num_barriers=stages)
    scratch = {
        "q_smem": compat.swizzled_smem((N, H), bf16),
        "k_ring": tile,
        "v_ring": tile,
        "p_smem": compat.swizzled_smem((N, TILE), bf16),
        "q_arrived": plgpu.Barrier(),
        "k_arrived": arrived,
        "v_arrived": arrived,
        "k_free": free,
        "v_free": free,
    }
    if sizes.is_narrow:
        scale, wide = plgpu.SMEM((stages, TILE), jnp.float32), (TILE, H)
        scratch |= {
            "k_scale_ring": scale,
            "v_scale_ring": scale,
            "k_wide": compat.swizzled_smem(wide, bf16),
            "v_wide": compat.swizzled_smem(wide, bf16),
        }
    return scratch


def _program(sizes: _Sizes, refs: dict[str, Any]) -> None:
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    context_len, start = refs["context_len"][row], refs["start"][row]
    tiles = sizes.tuning.split // TILE
    first = split * tiles
    if sizes.options.window is not None:
        earliest = earliest_key(start, context_len, sizes.options.window)
        first = jnp.maximum(first, lax.div(earliest, jnp.int32(TILE)))
    end = lax.div(context_len + (TILE - 1), jnp.int32(TILE))
    count = jnp.maximum(jnp.minimum((split + 1) * tiles, end) - first, 0)
    live = _Live(row, head, first, count, context_len, start)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == _PRODUCER)(lambda: _produce(sizes, refs, live))
    is_consumer = (warpgroup == _CONSUMER) & (count > 0)
    pl.when(is_consumer)(lambda: _consume(sizes, refs, live, split))


def _produce(sizes: _Sizes, refs: dict[str, Any], live: _Live) -> None:
    """Loads the tiles' pages, as many tiles ahead as the ring has slots."""
    stages = sizes.tuning.stages
    layer = refs["layer"][0]

    @pl.loop(0, live.count)
    def _(i: Array) -> None:
        slot = lax.rem(i, jnp.int32(stages))
        first_page = (live.first + i) * sizes.pages
        ids = [refs["table"][live.row, first_page + j] for j in range(sizes.pages)]
        for name in ("k", "v"):
            wait = functools.partial(plgpu.barrier_wait, refs[f"{name}_free"].at[slot])
            pl.when(i >= stages)(wait)
            arrived = refs[f"{name}_arrived"].at[slot]
            rings = [(name, f"{name}_ring")]
            if sizes.is_narrow:
                rings.append((f"{name}_scale", f"{name}_scale_ring"))
            for j, page in enumerate(ids):
                place = pl.ds(j * sizes.C, sizes.C)
                for source, ring in rings:
                    page_ref = refs[source].at[layer, page, live.head]
                    plgpu.copy_gmem_to_smem(
                        page_ref, refs[ring].at[slot, place], arrived
                    )

    # Every phase of a barrier has to be waited for, those of the last tiles, too.
    @pl.loop(live.count, live.count + stages)
    def _(i: Array) -> None:
        @pl.when(i >= stages)
        def _() -> None:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(refs["k_free"].at[slot])
            plgpu.barrier_wait(refs["v_free"].at[slot])


def _consume(sizes: _Sizes, refs: dict[str, Any], live: _Live, split: Array) -> None:
    """Goes through the tiles and writes the split's partial output."""
    N, H = sizes.N, sizes.H
    q_ref = refs["q"].at[live.row, live.head]
    plgpu.copy_gmem_to_smem(q_ref, refs["q_smem"], refs["q_arrived"])
    plgpu.barrier_wait(refs["q_arrived"])
    wide, narrow = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)

    def filled(shape: tuple[int, ...], value: float, layout: Any) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def tile(i: Array, carry: tuple[Array, Array, Array]) -> tuple:
        acc_HN, m_N, l_N = carry
        slot = lax.rem(i, jnp.int32(sizes.tuning.stages))
        first_key = (live.first + i) * TILE
        x_TN = _scores(sizes, refs, slot)
        ok_TN = _seen(sizes, refs, live, first_key)
        x_TN = jnp.where(ok_TN, x_TN, MASKED)
        new_m_N = jnp.maximum(m_N, x_TN.max(axis=0))
        shrink_N = jnp.exp2(m_N - new_m_N)
        p_TN = jnp.exp2(x_TN - lax.broadcast_in_dim(new_m_N, (TILE, N), [1]))
        p_TN = jnp.where(ok_TN, p_TN, 0.0)
        l_N = l_N * shrink_N + p_TN.sum(axis=0)
        acc_HN = acc_HN * lax.broadcast_in_dim(shrink_N, (H, N), [1])
        gain_HN = _gain(sizes, refs, slot, p_TN, live.context_len - first_key)
        return acc_HN + gain_HN, new_m_N, l_N

    acc_HN, m_N, l_N = lax.fori_loop(
        0,
        live.count,
        tile,
        (
            filled((H, N), 0.0, wide),
            filled((N,), MASKED, narrow),
            filled((N,), 0.0, narrow),
        ),
    )
    place = (split, live.row, live.head)
    compat.store(refs["acc"].at[place], acc_HN)
    compat.store(refs["m"].at[place], m_N)
    compat.store(refs["l"].at[place], l_N)


def _scores(sizes: _Sizes, refs: dict[str, Any], slot: Array) -> Array:
    """[TILE, N] in powers of two: a tile's keys times the queries."""
    shape = (TILE, sizes.N)
    plgpu.barrier_wait(refs["k_arrived"].at[slot])
    keys, scale_T = refs["k_ring"].at[slot], None
    if sizes.is_narrow:
        scale_T = load_scale(refs["k_scale_ring"].at[slot])
        refs["k_wide"][...] = widened(keys)
        keys = refs["k_wide"]
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["k_free"].at[slot])

    def multiply(acc: Any) -> Array:
        plgpu.wgmma(acc, keys, refs["q_smem"].transpose((1, 0)))
        return acc[...]

    x_TN = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    if scale_T is None:
        plgpu.barrier_arrive(refs["k_free"].at[slot])
    else:
        x_TN = x_TN * lax.broadcast_in_dim(scale_T, shape, [0])
    return base2_scores(x_TN, sizes.options, sizes.H)


def _seen(sizes: _Sizes, refs: dict[str, Any], live: _Live, first_key: Array) -> Array:
    """[TILE, N]: which keys of a tile each query sees; see AttentionArrays."""
    shape, layout = (TILE, sizes.N), plgpu.Layout.WGMMA
    key_TN = first_key + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    if sizes.has_tree:
        position_TN = per_query(refs["position"].at[live.row], shape)
        node_TN = key_TN - live.start
        mask_TN = per_query(refs["tree"].at[live.row], shape)
        bit_TN = lax.shift_left(jnp.int32(1), jnp.clip(node_TN, 0, 31))
        is_ancestor_TN = (node_TN < sizes.T) & ((mask_TN & bit_TN) != 0)
        ok_TN = (node_TN < 0) | is_ancestor_TN
    else:
        row_TN = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        token_TN = lax.div(row_TN, jnp.int32(sizes.G)) if sizes.G > 1 else row_TN
        position_TN = live.start + token_TN
        ok_TN = key_TN <= position_TN
    ok_TN = ok_TN & (key_TN < live.context_len)
    if sizes.options.window is not None:
        ok_TN = ok_TN & (key_TN > position_TN - sizes.options.window)
    return ok_TN


def _gain(
    sizes: _Sizes, refs: dict[str, Any], slot: Array, p_TN: Array, num_left: Array
) -> Array:
    """[H, N]: a tile's values times the weights; `num_left` keys of it are valid."""
    H, N = sizes.H, sizes.N
    values = refs["v_ring"].at[slot]
    plgpu.barrier_wait(refs["v_arrived"].at[slot])
    layout = plgpu.Layout.WGMMA
    if sizes.is_narrow:
        # What lies past the context may be NaN, and 0 * NaN is NaN.
        key_TN = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=layout)
        scale_T = load_scale(refs["v_scale_ring"].at[slot])
        scaled_TN = p_TN * lax.broadcast_in_dim(scale_T, (TILE, N), [0])
        p_TN = jnp.where(key_TN < num_left, scaled_TN, 0.0)
        refs["v_wide"][...] = cleaned(widened(values), num_left, NARROW_LAYOUT)
        values = refs["v_wide"]
    else:

        @pl.when(num_left < TILE)
        def _() -> None:
            refs["v_ring"][slot] = cleaned(refs["v_ring"][slot], num_left, layout)

    p_TN = plgpu.layout_cast(p_TN.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    refs["p_smem"].transpose((1, 0))[...] = p_TN
    plgpu.commit_smem()
    if sizes.is_narrow:
        plgpu.barrier_arrive(refs["v_free"].at[slot])

    def multiply(acc: Any) -> Array:
        weights = refs["p_smem"].transpose((1, 0))
        plgpu.wgmma(acc, values.transpose((1, 0)), weights)
        return acc[...]

    gain_HN = pl.run_scoped(multiply, plgpu.ACC((H, N), jnp.float32))
    if not sizes.is_narrow:
        plgpu.barrier_arrive(refs["v_free"].at[slot])
    return gain_HN
