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

from headrace.configs.drafts import Acceptance
from headrace.configs.schema import EngineConfig
from headrace.engine import drafting, page_moves, steps
from headrace.engine.drafting import Drafting
from headrace.engine.logprobs import TokenScores
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.page_moves import PAGES_PER_MOVE
from headrace.engine.processors import Extras, set_extras
from headrace.engine.proposer import Proposer, propose
from headrace.engine.sample_step import StepOutput, sample
from headrace.engine.sampling_params import TOP_ON_DEVICE, SampleVariant
from headrace.engine.slots import SlotState
from headrace.layers.inputs import KVCache, Params

VARIANTS: tuple[SampleVariant, ...] = typing.get_args(SampleVariant)

# ("decode", b) and, with drafts, ("verify", b), ("propose", b), ("history",);
# ("prefill", (R, T)), ("score", (R, T)), ("sample", variant, b),
# ("logits",), ("extras",), ("copy", J), ("save", J), ("load", J)
ProgramKey = tuple
ROLES = {
    "decode": "generating",
    "verify": "generating",
    "propose": "drafting",
    "history": "drafting",
    "prefill": "filling",
    "score": "filling",
    "sample": "sampling",
    "logits": "moving",
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
    drafting: Drafting | None = None


class Program(typing.NamedTuple):
    """What to compile; `donated` are places of `args`, `out` is like the result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...]
    out: Any


def program_name(key: ProgramKey) -> str:
    """The key as the ledger prints it."""
    kind, *rest = key
    if kind in ("prefill", "score"):
        return f"{kind}[{rest[0][0]}x{rest[0][1]}]"
    return f"{kind}[{', '.join(str(part) for part in rest)}]" if rest else kind


def program_keys(config: EngineConfig, *, can_move: bool) -> list[ProgramKey]:
    """Every program of a resolved config, in the order of the ledger.

    Args:
      config: resolved.
      can_move: pages go to host memory and back.
    """
    buckets, shapes = config.decode_batch_sizes or (), config.prefill_shapes or ()
    has_rows = not 0 <= config.max_logprobs <= TOP_ON_DEVICE
    moves = ("copy", "save", "load") if can_move else ("copy",)
    return [
        *generating_keys(config),
        *_drafting_keys(config, buckets),
        *(("prefill", shape) for shape in shapes),
        *(("score", shape) for shape in shapes if config.scoring),
        *(("sample", variant, b) for variant in VARIANTS for b in buckets),
        *((("logits",),) if has_rows else ()),
        ("extras",),
        *((kind, PAGES_PER_MOVE) for kind in moves),
    ]


def generating_keys(config: EngineConfig) -> list[ProgramKey]:
    """The programs that run the model on the rows of decode buckets."""
    buckets = config.decode_batch_sizes or ()
    return [(kind, bucket) for kind in config.generating_kinds for bucket in buckets]


def _drafting_keys(config: EngineConfig, buckets: tuple[int, ...]) -> list[ProgramKey]:
    if not config.drafts_per_pass:
        return []
    return [("history",), *(("propose", bucket) for bucket in buckets)]


def describe(
    key: ProgramKey,
    operands: Operands,
    *,
    model: Any,
    layout: PackedLayout,
    num_top: int,
    proposer: Proposer | None = None,
    acceptance: Acceptance = "exact",
) -> Program:
    """A program's function and arguments.

    Args:
      key: one of `program_keys`.
      operands: the engine's arrays.
      model: the Linen module.
      layout: of the packed array.
      num_top: log-probabilities per token.
      proposer: who drafts, if anybody.
      acceptance: of drafts.
    """
    kind, cache, logits_BQV = key[0], operands.kv_cache, operands.logits_BQV
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    if kind == "sample":
        return _sample(key, operands, packed, layout, num_top, acceptance)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    if kind == "logits":
        return Program(steps.logits_row, (logits_BQV, row), (), 0)
    if kind == "extras":
        rows = [
            jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            for leaf in jax.tree.leaves(operands.extras)
        ]
        args: tuple[Any, ...] = (operands.extras, row, *rows)
        return Program(set_extras, args, (0,), operands.extras)
    if kind in ("copy", "save", "load"):
        ids, data = page_moves.move_example(cache)
        if kind == "copy":
            return Program(page_moves.copy_pages, (cache, ids, ids), (0,), cache)
        if kind == "save":
            return Program(page_moves.save_pages, (cache, ids), (), data)
        return Program(page_moves.load_pages, (cache, ids, data), (0,), cache)
    if kind == "history":
        tokens = jax.ShapeDtypeStruct((layout.max_context_len,), jnp.int32)
        args = (operands.drafting, row, tokens)
        return Program(drafting.set_history, args, (0,), operands.drafting)
    if kind == "propose":
        assert proposer is not None
        function = functools.partial(
            propose, proposer=proposer, layout=layout, bucket=key[1]
        )
        args = (operands.params, cache, operands.drafting)
        args = (*args, operands.slots, packed, operands.extras)
        return Program(function, args, (1, 2), (cache, operands.drafting))
    options = {"model": model, "layout": layout, "num_top": num_top}
    return _forward(key, operands, packed, proposer=proposer, **options)


def _forward(
    key: ProgramKey,
    operands: Operands,
    packed: jax.ShapeDtypeStruct,
    *,
    model: Any,
    layout: PackedLayout,
    num_top: int,
    proposer: Proposer | None,
) -> Program:
    kind, drafting = key[0], operands.drafting
    args: tuple[Any, ...] = (
        operands.params, operands.kv_cache, operands.logits_BQV, operands.slots, packed
    )  # fmt: skip
    donated = (1, 2) if drafting is None else (1, 2, 5)
    args = args if drafting is None else (*args, drafting)
    common = {"model": model, "layout": layout}
    if kind == "verify":
        common["proposer"] = proposer
    out: tuple[Any, ...] = (operands.kv_cache, operands.logits_BQV, drafting)
    if kind in ("decode", "verify"):
        decode = functools.partial(steps.decode_forward, bucket=key[1], **common)
        return Program(decode, args, donated, out)
    common |= {"shape": key[1], "proposer": proposer}
    if kind == "prefill":
        prefill = functools.partial(steps.prefill_forward, **common)
        return Program(prefill, args, donated, out)
    score = functools.partial(steps.score_forward, num_top=num_top, **common)
    return Program(score, args, donated, (*out, _scores()))


def _sample(
    key: ProgramKey,
    operands: Operands,
    packed: jax.ShapeDtypeStruct,
    layout: PackedLayout,
    num_top: int,
    acceptance: Acceptance,
) -> Program:
    _, variant, bucket = key
    function = functools.partial(
        sample, layout=layout, bucket=bucket, variant=variant, num_top=num_top,
        acceptance=acceptance,
    )  # fmt: skip
    args: tuple[Any, ...] = (operands.slots, operands.logits_BQV, packed)
    output, extras = StepOutput(token_B=0, finish_B=0), None  # type: ignore[arg-type]
    donated: tuple[int, ...] = (0,)
    if variant == "full":
        extras, donated = operands.extras, (0, 3)
        num_rows, _, V = operands.logits_BQV.shape
        mask = jax.ShapeDtypeStruct((num_rows, num_mask_words(V)), jnp.int32)
        args = (*args, extras, mask)
        output = dataclasses.replace(output, scores=_scores())
    if operands.drafting is not None:
        args = (*args, *(None,) * (5 - len(args)), operands.drafting)
        donated = (*donated, 5)
        output = dataclasses.replace(output, live_B=0, is_draft_B=0)  # type: ignore[arg-type]
    out = (operands.slots, output, extras, operands.drafting)
    return Program(function, args, donated, out)


def _scores() -> TokenScores:
    """Stands for a result. Written out, not traced: a warm start has many of these."""
    return TokenScores(*[0] * len(TokenScores._fields))  # type: ignore[arg-type]


def num_mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)
