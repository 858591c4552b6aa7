"""The first pure program of a step, `forward`: decode, prefill or score.

Applies the model to a bucket's rows, writes KV pages and the logits rows it owns;
`score` is a prefill that also tells how likely the prompt was. sample_step.py turns the
logits into tokens. All are plain functions; model_runner compiles them, and so can a
notebook cell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine.drafting import Drafting
from headrace.engine.logprobs import TokenScores, token_scores
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.proposer import FillStep, Proposer
from headrace.engine.slots import SlotState, decoding_rows
from headrace.engine.step_inputs import (
    ending_prompts,
    prompt_inputs,
    slot_inputs,
)
from headrace.layers.inputs import KVCache, Params
from headrace.layers.linear import rows_up_to

# The head always sees at least this many rows: fewer would be another bit class.
MIN_HEAD_ROWS = 8
# Prompt tokens whose logits are in memory at a time while a prompt is scored.
SCORE_ROWS = 64

# The drafting state is None in an engine that drafts nothing.
ForwardResult = tuple[KVCache, Float[Array, "B Q V"], Drafting | None]


def decode_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    drafting: Drafting | None = None,
    *,
    model: Any,
    layout: PackedLayout,
    bucket: int,
    proposer: Proposer | None = None,
) -> ForwardResult:
    """The last token of each active slot below `bucket`, and its drafts, in one pass.

    Keys and values of drafts that turn out wrong lie beyond the row's position; the
    next step writes over them before anybody reads them.

    Args:
      params: the model's nested dict.
      kv_cache: donated.
      logits_BQV: donated; the bucket's rows are replaced. Within a step prefill comes
        after, and no row outlives its step.
      slots: state before this step's changes.
      packed: this step's changes.
      drafting: donated; with this step's drafts, which None or no proposer leaves out.
      model: the Linen module.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
      proposer: who drafted.
    """
    rows, decodes_B = decoding_rows(slots, packed, layout, bucket)
    tokens_BQ = rows.last_token_B[:, None]
    length_B = decodes_B.astype(jnp.int32)
    if drafting is not None and proposer is not None:
        drafts_BK = jnp.where(decodes_B[:, None], drafting.drafts_BK[:bucket], -1)
        tokens_BQ = jnp.concatenate([tokens_BQ, drafts_BK], axis=1)
        length_B += jnp.sum(drafts_BK >= 0, axis=1)
    inputs = slot_inputs(rows, tokens_BQ, rows.position_B, length_B, len(kv_cache))
    with rows_up_to(layout.num_slots * tokens_BQ.shape[1]):
        output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
        new_BQV = model.apply(
            {"params": params}, output.hidden_BTD, length_B, method="logits"
        )
    if drafting is not None and proposer is not None:
        drafting = proposer.after_decode(drafting, rows, output)
    Q = tokens_BQ.shape[1]
    return kv_cache, logits_BQV.at[:bucket, :Q].set(new_BQV), drafting


def prefill_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    drafting: Drafting | None = None,
    *,
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
    proposer: Proposer | None = None,
) -> ForwardResult:
    """One chunk of up to `shape[0]` prompts; arguments as for `decode_forward`.

    A row with the last chunk of its prompt writes its last token's logits to its
    slot's row, and to those of its forks. The target does not need the slot state: a
    chunk brings its own page table.
    """
    result, _ = _fill(
        params, kv_cache, logits_BQV, slots, packed, drafting,
        model=model, layout=layout, shape=shape, proposer=proposer,
    )  # fmt: skip
    return result


def score_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    drafting: Drafting | None = None,
    *,
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
    num_top: int,
    proposer: Proposer | None = None,
) -> tuple[KVCache, Float[Array, "B Q V"], Drafting | None, TokenScores]:
    """Like `prefill_forward`, and tells how likely each next prompt token was.

    The head sees `SCORE_ROWS` tokens at a time, so T x V logits are never in memory.

    Returns:
      Also, per row and token, the scores [R, T] of the token that follows it;
      meaningless where none does.
    """
    R, T = shape
    result, hidden_RTD = _fill(
        params, kv_cache, logits_BQV, slots, packed, drafting,
        model=model, layout=layout, shape=shape, proposer=proposer,
    )  # fmt: skip
    rows = layout.rows(packed)[:R]
    last_R = jnp.maximum(layout.field(rows, "length") - 1, 0)
    next_RT = jnp.roll(layout.tokens(packed, R, T), -1, axis=1)
    next_RT = next_RT.at[jnp.arange(R), last_R].set(layout.field(rows, "next_token"))

    def score(block: tuple[Array, Array]) -> TokenScores:
        hidden_SD, next_S = block
        z_SV = model.apply({"params": params}, hidden_SD, method="logits")
        return token_scores(z_SV, next_S, num_top)

    num_blocks = -(-R * T // SCORE_ROWS)
    pad = num_blocks * SCORE_ROWS - R * T
    hidden_XD = jnp.pad(hidden_RTD.reshape(R * T, -1), ((0, pad), (0, 0)))
    next_X = jnp.pad(jnp.maximum(next_RT, 0).reshape(R * T), (0, pad))
    blocks = (
        hidden_XD.reshape(num_blocks, SCORE_ROWS, -1),
        next_X.reshape(num_blocks, SCORE_ROWS),
    )
    with rows_up_to(layout.max_tokens):
        scores = jax.lax.map(score, blocks)

    def unblocked(leaf: Array) -> Array:
        flat = leaf.reshape(num_blocks * SCORE_ROWS, *leaf.shape[2:])
        return flat[: R * T].reshape(R, T, *leaf.shape[2:])

    return *result, jax.tree.map(unblocked, scores)


def logits_row(logits_BQV: Float[Array, "B Q V"], row: Array) -> Float[Array, " V"]:
    """One row of logits, for a host that wants all of them."""
    return logits_BQV[row, 0]


def _fill(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    drafting: Drafting | None,
    *,
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
    proposer: Proposer | None,
) -> tuple[ForwardResult, Float[Array, "R T D"]]:
    """What all prefill calls do; also the hidden states of the chunks."""
    inputs = prompt_inputs(packed, layout, shape, len(kv_cache))
    with rows_up_to(layout.max_tokens):
        output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
    hidden_RTD = output.hidden_BTD
    logits_BQV = _write_last(params, logits_BQV, hidden_RTD, packed, model, layout)
    if drafting is not None and proposer is not None:
        step = FillStep(
            slots=slots, packed=packed, inputs=inputs, output=output, layout=layout
        )
        kv_cache, drafting = proposer.after_fill(params, kv_cache, drafting, step)
    return (kv_cache, logits_BQV, drafting), hidden_RTD


def _write_last(
    params: Params,
    logits_BQV: Float[Array, "B Q V"],
    hidden_RTD: Float[Array, "R T D"],
    packed: Int[Array, " W"],
    model: Any,
    layout: PackedLayout,
) -> Float[Array, "B Q V"]:
    """Logits rows (donated) of the slots whose prompt ends here, forks included."""
    R = hidden_RTD.shape[0]
    last_RD, taken_W, slot_W = ending_prompts(hidden_RTD, packed, layout)
    last_RD = jnp.pad(last_RD, ((0, max(0, MIN_HEAD_ROWS - R)), (0, 0)))
    with rows_up_to(layout.max_tokens):
        new_RV = model.apply({"params": params}, last_RD, method="logits")[:R]
    return logits_BQV.at[slot_W, 0].set(new_RV[taken_W], mode="drop")
