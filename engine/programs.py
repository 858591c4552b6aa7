"""Every program of an engine: its key, its name, its function and arguments.

The runner compiles them; here is only what there is to compile.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from headrace.configs.schema import EngineConfig
from headrace.engine import page_moves, steps
from headrace.engine.packed_layout import PackedLayout, num_packed_rows
from headrace.engine.page_moves import PAGES_PER_MOVE
from headrace.engine.processors import Extras, set_extras
from headrace.engine.sampling_params import SampleVariant
from headrace.engine.slots import SlotState
from headrace.layers.inputs import KVCache, Params

VARIANTS: tuple[SampleVariant, ...] = typing.get_args(SampleVariant)

# ("decode", b), ("prefill", (R, T)), ("sample", variant, b), ("extras",),
# ("copy", J), ("save", J), ("load", J)
ProgramKey = tuple
ROLES = {
    "decode": "generating",
    "prefill": "filling",
    "sample": "sampling",
    "extras": "moving",
    "copy": "moving",
    "save": "moving",
    "load": "moving",
}


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays that programs work on, or their shapes."""

    params: Params
    kv_cache: KVCache
    logits_BQV: Float[Array, "B Q V"]
    slots: SlotState
    extras: Extras


class Program(typing.NamedTuple):
    """What to compile; `donated` are places of `args`, `out` is like the result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    out: Any


def program_name(key: ProgramKey) -> str:
    """The key as the ledger prints it."""
    kind, *rest = key
    if kind == "prefill":
        return f"prefill[{rest[0][0]}x{rest[0][1]}]"
    return f"{kind}[{', '.join(str(part) for part in rest)}]" if rest else kind


def program_keys(config: EngineConfig, *, can_move: bool) -> list[ProgramKey]:
    """Every program of a resolved config, in the order of the ledger.

    Args:
      config: resolved.
      can_move: pages go to host memory and back.
    """
    buckets, shapes = config.decode_batch_sizes or (), config.prefill_shapes or ()
    moves = ("copy", "save", "load") if can_move else ("copy",)
    return [
        *(("decode", bucket) for bucket in buckets),
        *(("prefill", shape) for shape in shapes),
        *(("sample", variant, b) for variant in VARIANTS for b in buckets),
        ("extras",),
        *((kind, PAGES_PER_MOVE) for kind in moves),
    ]


def layout_of(config: EngineConfig) -> PackedLayout:
    """The packed layout that a resolved config asks for."""
    shapes = config.prefill_shapes
    assert config.num_slots and config.max_context_len and shapes
    return PackedLayout(
        num_slots=config.num_slots,
        page_size=config.page_size,
        max_rows=num_packed_rows(config),
        max_stop_ids=config.max_stop_ids,
        pages_per_request=-(-config.max_context_len // config.page_size),
        max_tokens=max(rows * tokens for rows, tokens in shapes),
    )


def describe(
    key: ProgramKey,
    operands: Operands,
    *,
    model: Any,
    layout: PackedLayout,
    num_top: int,
) -> Program:
    """A program's function and arguments.

    Args:
      key: one of `program_keys`.
      operands: the engine's arrays.
      model: the Linen module.
      layout: of the packed array.
      num_top: log-probabilities per token.
    """
    kind, cache = key[0], operands.kv_cache
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    if kind == "sample":
        return _sample(key, operands, packed, layout, num_top)
    if kind == "extras":
        V = operands.logits_BQV.shape[-1]
        row = jax.ShapeDtypeStruct((), jnp.int32)
        count_V, bias_V = (
            jax.ShapeDtypeStruct((V,), dtype) for dtype in (jnp.int32, jnp.float32)
        )
        args: tuple[Any, ...] = (operands.extras, row, count_V, bias_V)
        return Program(set_extras, args, (0,), operands.extras)
    if kind in ("copy", "save", "load"):
        ids, data = page_moves.move_example(cache)
        if kind == "copy":
            return Program(page_moves.copy_pages, (cache, ids, ids), (0,), cache)
        if kind == "save":
            return Program(page_moves.save_pages, (cache, ids), (), data)
        return Program(page_moves.load_pages, (cache, ids, data), (0,), cache)
    common = {"model": model, "layout": layout}
    if kind == "decode":
        function = functools.partial(steps.decode_forward, bucket=key[1], **common)
    else:
        function = functools.partial(steps.prefill_forward, shape=key[1], **common)
    logits_BQV = operands.logits_BQV
    args = (operands.params, cache, logits_BQV, operands.slots, packed)
    return Program(function, args, (1, 2), (cache, logits_BQV))


def _sample(
    key: ProgramKey,
    operands: Operands,
    packed: jax.ShapeDtypeStruct,
    layout: PackedLayout,
    num_top: int,
) -> Program:
    _, variant, bucket = key
    function = functools.partial(
        steps.sample, layout=layout, bucket=bucket, variant=variant, num_top=num_top
    )
    is_full = variant == "full"
    extras = operands.extras if is_full else None
    args = (operands.slots, operands.logits_BQV, packed, extras)
    donated = (0, 3) if is_full else (0,)
    # Written out, not traced: a warm start has many of these.
    fields = [field.name for field in dataclasses.fields(steps.StepOutput)]
    asked: Any = dict.fromkeys(fields if is_full else ("token_B", "finish_B"), 0)
    output = steps.StepOutput(**asked)
    return Program(function, args, donated, (operands.slots, output, extras))
