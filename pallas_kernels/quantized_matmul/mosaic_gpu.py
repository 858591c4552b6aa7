"""Rows times weights of 4 or 8 bits with scales, for GPUs with wgmma (sm_90).

The product is transposed: outputs lie on the 64-row side of wgmma, rows of activations
on its narrow side (8, 16, ..), so a batch of few rows wastes nothing.

    sums     acc[output, row] += scale[output, group] * (q[output, :] . x[row, :])
    weights  acc[output, row] += (scale * q)[output, :] . x[row, :]

A producer warpgroup loads tiles of 128 inputs by TMA into a ring; consumers make the
stored numbers bfloat16 (exactly: they are whole and small, or e4m3), put them into
shared memory, multiply. Scales come by plain loads: a tile needs one per output and
group, in rows too short for TMA. int4 needs no shuffled packing: eight numbers are a
32-bit load from shared memory in a layout that may be stored as it is.

An output's sum runs over its split's tiles in order, tile i in chain i % chains; then
come the chains, then the splits, in order. All that follows from the weight and the
role alone (`tuning.tuning`), neither from how many rows there are nor from which row
one is; nor does a program's width, as far as wgmma's sums do not depend on its N.

Rules for review: the interpreter cannot see that they are broken.
1. A slot of the ring is released only after the accumulator was read (`acc[...]` waits
   for wgmma) or after `wgmma_wait(0)`, never between the issue of a product and its
   wait; nor is `wide` written in between.
2. `commit_smem` stands between plain stores to shared memory and the wgmma that reads
   them, and between plain reads of a slot and its release to TMA.
Source: Frantar et al. 2024 (MARLIN), without its shuffled weights.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int, Num

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.quantized_matmul.tuning import TILE, Tuning

_MATRIX = plgpu.Layout.WGMMA
_TMA_ALIGNMENT = 128
# Outputs that are made wide at a time; wgmma's long side.
_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What is known while tracing.

    Attributes:
      group: inputs that share a scale.
      tiles: of one split.
      has_zeros: a zero point beside each scale.
    """

    group: int
    tiles: int
    has_zeros: bool
    tuning: Tuning

    @property
    def groups(self) -> int:
        """Scales of an output in a tile."""
        return max(1, TILE // self.group)

    @property
    def width(self) -> int:
        """Inputs of a tile that share a scale."""
        return TILE // self.groups


def quantized_matmul_mosaic(
    values_OI: Num[Array, "O I"],
    scales_OS: Float[Array, "O S"],
    zeros_OS: Int[Array, "O S"] | None,
    x_RI: BFloat16[Array, "R I"],
    *,
    out_dtype: DTypeLike,
    tuning: Tuning,
    interpret: Any = None,
) -> Float[Array, "R O"]:
    """See `api.quantized_matmul`, whose arguments these are, already checked.

    Args:
      tuning: block sizes.
      interpret: see `compat.interpreter`.
    """
    (outputs, inputs), rows = values_OI.shape, x_RI.shape[0]
    t = tuning
    assert outputs % t.program_outputs == 0 and inputs % (TILE * t.splits) == 0
    assert t.stages % t.chains == 0 and t.rows % 8 == 0
    sizes = _Sizes(
        group=inputs // scales_OS.shape[1],
        tiles=inputs // TILE // t.splits,
        has_zeros=zeros_OS is not None,
        tuning=t,
    )
    blocks = -(-rows // t.rows)
    x_RI = jnp.pad(x_RI, ((0, blocks * t.rows - rows), (0, 0)))
    operands = {"values": values_OI, "scales": scales_OS, "x": x_RI}
    if zeros_OS is not None:
        operands["zeros"] = zeros_OS
    scratch = _scratch(sizes, values_OI.dtype)
    names = [*operands, "out", *scratch]
    # A sum over splits is rounded when it is whole.
    part_dtype = out_dtype if t.splits == 1 else jnp.float32

    def body(*refs: Any) -> None:
        _program(sizes, dict(zip(names, refs, strict=True)))

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((t.splits, x_RI.shape[0], outputs), part_dtype),
        grid=(outputs // t.program_outputs, t.splits, blocks),
        grid_names=("outputs", "split", "rows"),
        num_threads=t.consumers * t.chains + 1,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        kernel_name="quantized_matmul",
        **compat.kernel_options(interpret),
    )
    parts_PRO = kernel(*operands.values())
    # One by one: what XLA makes of a sum over an axis may depend on the others.
    sum_RO = functools.reduce(jnp.add, [parts_PRO[i] for i in range(t.splits)])
    return sum_RO[:rows].astype(out_dtype)


def _scratch(sizes: _Sizes, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers, by name."""
    t, workers = sizes.tuning, sizes.tuning.consumers * sizes.tuning.chains
    bits = 4 if jnp.dtype(dtype) == jnp.int4 else 8
    # What TMA writes begins at multiples of 128 bytes.
    assert t.program_outputs * TILE * bits // 8 % _TMA_ALIGNMENT == 0
    assert t.rows * TILE * 2 % _TMA_ALIGNMENT == 0
    smem, bf16 = compat.swizzled_smem, jnp.bfloat16
    cut = min(128, sizes.width * 2)  # bytes between which products cut their inputs
    scratch = {
        "ring": smem((t.stages, t.program_outputs, TILE), dtype),
        "x_ring": smem((t.stages, t.rows, TILE), bf16, cut),
        "wide": smem((workers, t.outputs, TILE), bf16, cut),
        "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        "free": plgpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    }
    if t.chains > 1:
        sums = (t.chains - 1, t.consumers, t.outputs, t.rows)
        scratch |= {
            "sums": plgpu.SMEM(sums, jnp.float32),
            "summed": plgpu.Barrier(
                num_arrivals=t.chains - 1, num_barriers=t.consumers
            ),
        }
    return scratch


def _program(sizes: _Sizes, refs: dict[str, Any]) -> None:
    t = sizes.tuning
    warpgroup, workers = lax.axis_index("warpgroup"), t.consumers * t.chains

    @pl.when(warpgroup == workers)
    def _() -> None:
        if t.registers is not None:
            plgpu.set_max_registers(t.registers[0], action="decrease")
        _produce(sizes, refs)

    @pl.when(warpgroup < workers)
    def _() -> None:
        if t.registers is not None:
            plgpu.set_max_registers(t.registers[1], action="increase")
        _consume(sizes, refs, warpgroup)


def _produce(sizes: _Sizes, refs: dict[str, Any]) -> None:
    """Keeps the ring full."""
    t, (outputs, split, rows) = sizes.tuning, _place()
    of_outputs = pl.ds(outputs * t.program_outputs, t.program_outputs)
    of_rows = pl.ds(rows * t.rows, t.rows)

    @pl.loop(0, sizes.tiles)
    def _(i: Array) -> None:
        slot = lax.rem(i, jnp.int32(t.stages))
        wait = functools.partial(plgpu.barrier_wait, refs["free"].at[slot])
        pl.when(i >= t.stages)(wait)
        inputs = pl.ds((split * sizes.tiles + i) * TILE, TILE)
        arrived = refs["arrived"].at[slot]
        source = refs["values"].at[of_outputs, inputs]
        plgpu.copy_gmem_to_smem(source, refs["ring"].at[slot], arrived)
        source = refs["x"].at[of_rows, inputs]
        plgpu.copy_gmem_to_smem(source, refs["x_ring"].at[slot], arrived)

    # No phase may be left unobserved.
    @pl.loop(max(sizes.tiles - t.stages, 0), sizes.tiles)
    def _(i: Array) -> None:
        plgpu.barrier_wait(refs["free"].at[lax.rem(i, jnp.int32(t.stages))])


def _place() -> tuple[Array, Array, Array]:
    """Which program this is: along outputs, splits of the inputs, and rows."""
    outputs, split, rows = map(lax.axis_index, ("outputs", "split", "rows"))
    return outputs, split, rows


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A consumer warpgroup.

    Attributes:
      index: among all of the program.
      part: its place along the outputs.
      chain: which tiles are its own.
      first: its first output.
    """

    index: Array
    part: Array
    chain: Array
    first: Array


def _consume(sizes: _Sizes, refs: dict[str, Any], warpgroup: Array) -> None:
    """Goes through a chain of tiles, adds the chains up and writes the sums."""
    t, (outputs, split, rows) = sizes.tuning, _place()
    part = lax.rem(warpgroup, jnp.int32(t.consumers))
    chain = lax.div(warpgroup, jnp.int32(t.consumers))
    first = (outputs * t.consumers + part) * t.outputs
    worker = _Worker(warpgroup, part, chain, first)
    acc_OR = (_sums if t.on_sums else _whole)(sizes, refs, worker)

    def write(acc_OR: Array) -> None:
        place = split, pl.ds(rows * t.rows, t.rows), pl.ds(first, t.outputs)
        out_RO = refs["out"].at[place]
        acc_OR = acc_OR.astype(out_RO.dtype)
        acc_OR = plgpu.layout_cast(acc_OR, plgpu.Layout.WGMMA_TRANSPOSED)
        compat.store(out_RO.transpose((1, 0)), acc_OR)

    if t.chains == 1:
        write(acc_OR)
        return

    @pl.when(chain > 0)
    def _() -> None:
        refs["sums"].at[chain - 1, part][...] = acc_OR
        plgpu.barrier_arrive(refs["summed"].at[part])

    @pl.when(chain == 0)
    def _() -> None:
        plgpu.barrier_wait(refs["summed"].at[part])
        total_OR = acc_OR
        for i in range(t.chains - 1):
            source = refs["sums"].at[i, part]
            total_OR = total_OR + plgpu.load(source, layout=_MATRIX, optimized=False)
        write(total_OR)


def _sums(sizes: _Sizes, refs: dict[str, Any], worker: _Worker) -> Array:
    """[outputs, rows]: each group's sums by themselves, then times its scale."""
    t = sizes.tuning
    shape = t.outputs, t.rows
    assert t.outputs == _BLOCK

    def tile(turn: Array, acc_OR: Array) -> Array:
        slot, number = _turn(sizes, worker, turn)
        scales = _per_group(sizes, refs["scales"], worker.first, number, _MATRIX)
        _widen(sizes, refs, worker, slot, number)
        for g, scale_O in enumerate(scales):
            some = pl.ds(g * sizes.width, sizes.width)
            weights = refs["wide"].at[worker.index, :, some]
            x = refs["x_ring"].at[slot, :, some].transpose((1, 0))

            def multiply(acc: Any, weights: Any = weights, x: Any = x) -> Array:
                plgpu.wgmma(acc, weights, x)
                return acc[...]

            sums_OR = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
            acc_OR = acc_OR + sums_OR * lax.broadcast_in_dim(scale_O, shape, [0])
        plgpu.barrier_arrive(refs["free"].at[slot])
        return acc_OR

    zero_OR = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _MATRIX)
    return lax.fori_loop(0, _turns(sizes, worker), tile, zero_OR)


def _whole(sizes: _Sizes, refs: dict[str, Any], worker: _Worker) -> Array:
    """[outputs, rows]: one sum of products with scaled weights."""
    t = sizes.tuning

    def multiply(acc: Any) -> Array:
        @pl.loop(0, _turns(sizes, worker))
        def _(turn: Array) -> None:
            slot, number = _turn(sizes, worker, turn)
            _widen(sizes, refs, worker, slot, number)
            x = refs["x_ring"].at[slot].transpose((1, 0))
            plgpu.wgmma(acc, refs["wide"].at[worker.index], x)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(refs["free"].at[slot])

        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((t.outputs, t.rows), jnp.float32))


def _turns(sizes: _Sizes, worker: _Worker) -> Array | int:
    """Tiles of the worker's chain."""
    chains = sizes.tuning.chains
    if chains == 1:
        return sizes.tiles
    return lax.div(sizes.tiles + chains - 1 - worker.chain, jnp.int32(chains))


def _turn(sizes: _Sizes, worker: _Worker, turn: Array) -> tuple[Array, Array]:
    """Where the tile of a turn lies in the ring, and its number among all inputs."""
    i = turn * sizes.tuning.chains + worker.chain
    _, split, _ = _place()
    return lax.rem(i, jnp.int32(sizes.tuning.stages)), split * sizes.tiles + i


def _widen(
    sizes: _Sizes, refs: dict[str, Any], worker: _Worker, slot: Array, number: Array
) -> None:
    """A tile's weights as bfloat16 in the worker's own shared memory."""
    t, source = sizes.tuning, refs["ring"].at[slot]
    # 32-bit loads: eight numbers of 4 bits, four of 8.
    layout = plgpu.Layout.WGMMA_UPCAST_2X
    if source.dtype == jnp.int4:
        layout = plgpu.Layout.WGMMA_UPCAST_4X

    def per_group(name: str, start: int) -> list[Array]:
        first = worker.first + start
        return _per_group(sizes, refs[name], first, number, layout)

    starts = range(0, t.outputs, _BLOCK)
    zeros = [per_group("zeros", start) for start in starts if sizes.has_zeros]
    scales = [per_group("scales", start) for start in starts if not t.on_sums]
    plgpu.barrier_wait(refs["arrived"].at[slot])
    for i, start in enumerate(starts):
        rows = pl.ds(worker.part * t.outputs + start, _BLOCK)
        weight_OI = plgpu.load(source.at[rows], layout=layout)
        if not jnp.issubdtype(weight_OI.dtype, jnp.integer):
            weight_OI = weight_OI.astype(jnp.float32)  # e4m3 has no direct way
        weight_OI = weight_OI.astype(jnp.bfloat16)
        if sizes.has_zeros:
            narrow = [zero_O.astype(jnp.bfloat16) for zero_O in zeros[i]]
            weight_OI = weight_OI - _along_inputs(sizes, narrow, layout)
        if not t.on_sums:
            scale_OI = _along_inputs(sizes, scales[i], layout)
            weight_OI = (weight_OI.astype(jnp.float32) * scale_OI).astype(jnp.bfloat16)
        refs["wide"][worker.index, pl.ds(start, _BLOCK)] = weight_OI
    plgpu.commit_smem()


def _per_group(
    sizes: _Sizes, source: Any, first: Array, number: Array, layout: Any
) -> list[Array]:
    """Numbers [64] of outputs from `first` on, for each group of a tile."""
    group = lax.div(number * TILE, jnp.int32(sizes.group))
    load = functools.partial(plgpu.load, layout=layout.reduce(1), optimized=False)
    rows = pl.ds(first, _BLOCK)
    return [load(source.at[rows, group + g]) for g in range(sizes.groups)]


def _along_inputs(sizes: _Sizes, per_group: list[Array], layout: Any) -> Array:
    """Numbers [64] of groups, repeated over the inputs of each."""
    shape = _BLOCK, TILE
    values = [lax.broadcast_in_dim(value_O, shape, [0]) for value_O in per_group]
    result = values[0]
    if len(values) > 1:
        input_OI = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        for g, value in enumerate(values[1:], 1):
            result = jnp.where(input_OI >= g * sizes.width, value, result)
    return result
