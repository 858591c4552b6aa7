"""Chunked prefill over paged KV on Hopper (sm_90): flash attention in Mosaic GPU.

A program is two consumer warpgroups and a producer. A consumer owns 64 successive
queries of one query head; the producer loads the pages that the two of them see into a
ring of key and value tiles. Tiles lie at fixed absolute positions and are visited in
order, and one that hides all its keys from a query leaves no trace in it: a query's
bits depend on its position and its keys alone, not on other rows, nor on the chunk.

For review, because the interpreter cannot see it (its wgmma is synchronous):
  * a slot is given back (`barrier_arrive` of a free barrier) only after the accumulator
    of the wgmma that reads it was read;
  * `commit_smem` stands between stores to shared memory and the wgmma or TMA that reads
    them: weights, cleared values, the output;
  * q's tile becomes the output's only after the last score product was read;
  * the producer waits for all slots before it ends (jax 0.12 does not insist).
NOTE: with `weights_in_registers`, tuned for head_dim 256, `_add_values` takes a branch
that no interpreter runs; interpreted kernels take its twin, through shared memory.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.paged_attention.mosaic_gpu_tiles import (
    LOG2E,
    MASKED,
    base2_scores,
    cleaned,
)
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
)
from headrace.pallas_kernels.paged_attention.tuning import (
    PrefillTuning,
    prefill_tuning,
)

_CONSUMERS, _QUERIES = 2, 64  # warpgroups, and the rows of wgmma's accumulator
_MATRIX, _COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def paged_prefill_mosaic(
    q_BTKGH: BFloat16[Array, "B T K G H"],
    pools: tuple[BFloat16[Array, "L P K C H"], BFloat16[Array, "L P K C H"]],
    layer: int | jax.Array,
    arrays: AttentionArrays,
    options: AttentionOptions,
    *,
    tuning: PrefillTuning | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "B T K G H"]:
    """Attention of chunks of prompts; arguments as in `api.paged_attention`, checked.

    There is neither a tree mask nor a quantized pool; see `tuning.refusal`.

    Queries at or past the context give zeros.

    Args:
      tuning: None takes `prefill_tuning`.
      interpret: `compat.interpreter()` on a CPU.
    """
    assert arrays.tree_mask_BT is None and arrays.k_scales is None
    B, T, K, G, H = q_BTKGH.shape
    tuning = tuning or prefill_tuning(H)
    if interpret is not None and tuning.weights_in_registers:
        tuning = dataclasses.replace(tuning, weights_in_registers=False, columns=64)
    # A tile that hangs over the end would store into the next row.
    q_BTKGH = jnp.pad(q_BTKGH, ((0, 0), (0, -T % _QUERIES), *((0, 0),) * 3))
    plan = _Plan(q_BTKGH.shape, options, tuning)
    indices = arrays.page_table_BM, arrays.positions_BT, arrays.context_len_B
    inputs = {
        "q": q_BTKGH.reshape(*q_BTKGH.shape[:2], K * G, H),
        "k": pools[0],
        "v": pools[1],
        "layer": compat.int32_input(layer),
        **dict(zip(("table", "positions", "context_len"), indices, strict=True)),
    }
    if arrays.sinks_KG is not None:
        inputs["sinks"] = arrays.sinks_KG
    out_BTNH = _kernel(plan, tuple(inputs), pools[0].shape[3], interpret)(
        *inputs.values()
    )
    return out_BTNH[:, :T].reshape(B, T, K, G, H)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is traced.

    A unit of work of a kv head is 64 queries of one of its G query heads, head by head
    and then on to the next queries; a program does a pair of units.
    """

    shape: tuple[int, int, int, int, int]  # of the queries
    options: AttentionOptions
    tuning: PrefillTuning

    @property
    def num_units(self) -> int:
        return self.shape[1] // _QUERIES * self.shape[3]

    def unit(self, unit: Any) -> tuple[Any, Any]:
        """Its first query within the chunk, and its head within the group.

        An odd number leaves one unit to spare: it repeats the last queries, unstored.
        """
        _, T, _, G, _ = self.shape
        block = jnp.minimum(lax.div(unit, jnp.int32(G)), T // _QUERIES - 1)
        return block * _QUERIES, lax.rem(unit, jnp.int32(G))


@dataclasses.dataclass(frozen=True)
class _Program:
    """One program: kv head k of row b, the keys of tiles [first, first + count)."""

    plan: _Plan
    refs: Any  # see `_kernel`
    b: Any
    k: Any
    start: Any  # position of the row's first query
    context_len: Any
    first: Any
    count: Any

    def slot(self, i: Any) -> Any:
        return lax.rem(i, jnp.int32(self.plan.tuning.stages))


def _kernel(
    plan: _Plan, inputs: tuple[str, ...], page_size: int, interpret: Any
) -> Any:
    """The Pallas call: one program per row, kv head and pair of units."""
    B, T, K, G, H = plan.shape
    S, stages = plan.tuning.keys, plan.tuning.stages
    num_pages, num_pairs = S // page_size, -(-plan.num_units // _CONSUMERS)
    smem, barrier = compat.swizzled_smem, plgpu.Barrier
    scratch = {
        "q_tile": smem((_CONSUMERS, _QUERIES, H), jnp.bfloat16),  # later the output
        "k_ring": smem((stages, S, H), jnp.bfloat16),
        "v_ring": smem((stages, S, H), jnp.bfloat16),
        "q_ready": barrier(num_barriers=_CONSUMERS),
        "k_ready": barrier(num_arrivals=num_pages, num_barriers=stages),
        "v_ready": barrier(num_arrivals=num_pages, num_barriers=stages),
        "k_free": barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "v_free": barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
        "tail_ready": barrier(num_arrivals=num_pages),
    }
    if not plan.tuning.weights_in_registers:
        scratch["weights"] = smem((_CONSUMERS, _QUERIES, S), jnp.bfloat16)
    names = (*inputs, "out", *scratch)

    def body(*refs: Any) -> None:
        named = types.SimpleNamespace(**dict(zip(names, refs, strict=True)))
        pair = num_pairs - 1 - lax.axis_index("pair")  # the longest first
        program = _program(plan, named, pair)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(plan.tuning.registers[0], action="decrease")
            _produce(program)

        @pl.when(warpgroup < _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(plan.tuning.registers[1], action="increase")
            _consume(program, pair, warpgroup)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((B, T, K * G, H), jnp.bfloat16),
        grid=(B, K, num_pairs),
        grid_names=("row", "kv_head", "pair"),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        scratch_types=tuple(scratch.values()),
        **compat.kernel_options(interpret),
    )


def _program(plan: _Plan, refs: Any, pair: Any) -> _Program:
    """From the first key that the pair's first query sees to the last one's last."""
    b, k = lax.axis_index("row"), lax.axis_index("kv_head")
    S, window = plan.tuning.keys, plan.options.window
    start, context_len = refs.positions[b, 0], refs.context_len[b]
    first_query = start + plan.unit(pair * _CONSUMERS)[0]
    last_query = start + plan.unit(pair * _CONSUMERS + 1)[0] + _QUERIES - 1
    last_key = jnp.minimum(last_query, context_len - 1)
    end = lax.div(last_key + S, jnp.int32(S))
    first = jnp.int32(0)
    if window is not None:
        first = lax.div(jnp.maximum(first_query - (window - 1), 0), jnp.int32(S))
    # Where all queries are padding there is nothing to read.
    count = jnp.where(first_query < context_len, end - first, 0)
    return _Program(plan, refs, b, k, start, context_len, first, count)


def _produce(program: _Program) -> None:
    """Keeps the ring full; values past the context, NaN perhaps, become zeros."""
    refs, S = program.refs, program.plan.tuning.keys
    stages, C = program.plan.tuning.stages, refs.k.shape[3]
    has_tail = (program.first + program.count) * S > program.context_len

    @pl.loop(0, program.count)
    def _(i: Any) -> None:
        slot, pages = program.slot(i), _page_ids(program, i)

        def load(pool: Any, ring: Any, ready: Any) -> None:
            for j, page in enumerate(pages):
                rows = ring.at[slot, pl.ds(j * C, C)]
                source = pool.at[refs.layer[0], page, program.k]
                plgpu.copy_gmem_to_smem(source, rows, ready)

        pl.when(i >= stages)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
        load(refs.k, refs.k_ring, refs.k_ready.at[slot])
        pl.when(i >= stages)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
        is_tail = has_tail & (i == program.count - 1)

        @pl.when(jnp.logical_not(is_tail))
        def _() -> None:
            load(refs.v, refs.v_ring, refs.v_ready.at[slot])

        @pl.when(is_tail)
        def _() -> None:
            load(refs.v, refs.v_ring, refs.tail_ready)
            plgpu.barrier_wait(refs.tail_ready)
            num_held = program.context_len - (program.first + i) * S
            _clear_tail(refs.v_ring.at[slot], num_held)
            plgpu.commit_smem()
            for _ in pages:
                plgpu.barrier_arrive(refs.v_ready.at[slot])

    # No phase may be left unobserved.
    @pl.loop(jnp.maximum(program.count - stages, 0), program.count)
    def _(i: Any) -> None:
        plgpu.barrier_wait(refs.k_free.at[program.slot(i)])
        plgpu.barrier_wait(refs.v_free.at[program.slot(i)])


def _page_ids(program: _Program, i: Any) -> list[Any]:
    """Ids of the pages of the program's tile i; 0 for one outside the pool."""
    (_, P, _, C, _), M = program.refs.k.shape, program.refs.table.shape[1]
    num_pages = program.plan.tuning.keys // C
    ids = []
    for j in range(num_pages):
        m = jnp.minimum((program.first + i) * num_pages + j, M - 1)
        page = program.refs.table[program.b, m]
        ids.append(jnp.where((page >= 0) & (page < P), page, 0))
    return ids


def _clear_tail(values: Any, num_held: Any) -> None:
    """Rows of a tile [S, H] past the first `num_held` become zeros."""
    S, H = values.shape
    for row in range(0, S, 64):
        for column in range(0, H, 64):
            block = values.at[pl.ds(row, 64), pl.ds(column, 64)]
            block[...] = cleaned(block[...], num_held - row, _MATRIX)


def _consume(program: _Program, pair: Any, warpgroup: Any) -> None:
    """One unit: 64 queries of one head over the program's tiles.

    Source: Milakov and Gimelshein 2018, algorithm 3 (online softmax); Dao 2023,
    algorithm 1.
    """
    plan, refs = program.plan, program.refs
    S, unit = plan.tuning.keys, pair * _CONSUMERS + warpgroup
    query, g = plan.unit(unit)
    position = program.start + query
    rows = (program.b, pl.ds(query, _QUERIES), program.k * plan.shape[3] + g)
    q_tile, q_ready = refs.q_tile.at[warpgroup], refs.q_ready.at[warpgroup]
    plgpu.copy_gmem_to_smem(refs.q.at[rows], q_tile, q_ready)
    plgpu.barrier_wait(q_ready)

    def tile(i: Any, carry: tuple) -> tuple:
        top, total, blocks = carry
        slot = program.slot(i)
        plgpu.barrier_wait(refs.k_ready.at[slot])

        def product(accumulator: Any) -> Any:
            plgpu.wgmma(accumulator, q_tile, refs.k_ring.at[slot].transpose((1, 0)))
            return accumulator[...]

        score = pl.run_scoped(product, plgpu.ACC((_QUERIES, S), jnp.float32))
        plgpu.barrier_arrive(refs.k_free.at[slot])
        score = base2_scores(score, plan.options, plan.shape[4])
        score = _hide(program, score, (program.first + i) * S, position)
        weight, shrink, top, total = _weigh(score, top, total)
        if not plan.tuning.weights_in_registers:
            refs.weights.at[warpgroup][...] = weight
            plgpu.commit_smem()
            weight = refs.weights.at[warpgroup]
        plgpu.barrier_wait(refs.v_ready.at[slot])
        blocks = _add_values(plan, blocks, shrink, weight, refs.v_ring.at[slot])
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return top, total, blocks

    start = _start(program, g)
    _, total, blocks = lax.fori_loop(0, program.count, tile, start)
    row = plgpu.broadcasted_iota(jnp.int32, (_QUERIES,), 0, layout=_COLUMN)
    is_live = (row + position < program.context_len) & (total > 0)
    inverse = jnp.where(is_live, 1.0 / jnp.where(is_live, total, 1.0), 0.0)
    for c, block in enumerate(blocks):
        columns = pl.ds(c * block.shape[1], block.shape[1])
        block = block * lax.broadcast_in_dim(inverse, block.shape, [0])
        q_tile[:, columns] = block.astype(jnp.bfloat16)
    plgpu.commit_smem()

    @pl.when(unit < plan.num_units)
    def _() -> None:
        plgpu.copy_smem_to_gmem(q_tile, refs.out.at[rows])
        plgpu.wait_smem_to_gmem(0)


def _start(program: _Program, g: Any) -> tuple:
    """(largest score, sum of weights, output) before the first tile.

    A sink is a score whose value is zero.
    """

    def full(shape: tuple[int, ...], value: Any, layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    H, width = program.plan.shape[4], program.plan.tuning.columns
    zeros = tuple(full((_QUERIES, width), 0, _MATRIX) for _ in range(H // width))
    top, total = (full((_QUERIES,), value, _COLUMN) for value in (MASKED, 0))
    if hasattr(program.refs, "sinks"):
        sink = program.refs.sinks[program.k, g] * LOG2E
        top = jnp.maximum(top, sink)
        total = jnp.exp2(sink - top)
    return top, total, zeros


def _hide(program: _Program, score: Any, first_key: Any, position: Any) -> Any:
    """Masks what the queries at `position` and on do not see; most tiles hide none."""
    S, window = program.plan.tuning.keys, program.plan.options.window
    end = first_key + S
    is_open = (end <= program.context_len) & (end - 1 <= position)
    if window is not None:
        is_open &= first_key > position + _QUERIES - 1 - window

    def mask(score: Any) -> Any:
        key, row = (
            plgpu.broadcasted_iota(jnp.int32, score.shape, axis, layout=_MATRIX) + start
            for axis, start in ((1, first_key), (0, position))
        )
        is_seen = (key <= row) & (key < program.context_len)
        if window is not None:
            is_seen &= key > row - window
        return jnp.where(is_seen, score, MASKED)

    return lax.cond(is_open, lambda score: score, mask, score)


def _weigh(score: Any, top: Any, total: Any) -> tuple[Any, Any, Any, Any]:
    """(weights, factor of what was summed before, largest score, sum of weights).

    Hidden keys weigh 1 for a query that has seen none yet; its first key, which every
    live query has, shrinks them to an exact 0.
    """
    new_top = jnp.maximum(top, score.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weight = jnp.exp2(score - lax.broadcast_in_dim(new_top, score.shape, [0]))
    total = total * shrink + weight.sum(axis=1)
    return weight.astype(jnp.bfloat16), shrink, new_top, total


def _add_values(
    plan: _Plan, blocks: tuple, shrink: Any, weight: Any, values: Any
) -> tuple:
    """blocks * shrink + weight @ values, where blocks are columns of the output."""
    width = blocks[0].shape[1]
    blocks = [b * lax.broadcast_in_dim(shrink, b.shape, [0]) for b in blocks]
    if plan.tuning.weights_in_registers:
        (whole,) = blocks
        add = lambda accumulator: plgpu.wgmma(accumulator, weight, values)  # noqa: E731
        return (pl.run_state(add)(plgpu.ACC.init(whole)),)

    def product(accumulator: Any, c: int) -> Any:
        plgpu.wgmma(accumulator, weight, values.at[:, pl.ds(c * width, width)])
        return accumulator[...]

    accumulator = plgpu.ACC(blocks[0].shape, jnp.float32)
    return tuple(
        block + pl.run_scoped(functools.partial(product, c=c), accumulator)
        for c, block in enumerate(blocks)
    )
