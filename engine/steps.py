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
from headrace.engine.slots import SlotState, decoding_rows
from headrace.layers.inputs import KVCache, ModelInputs, Params
from headrace.layers.linear import rows_up_to

# The head always sees at least this many rows: fewer would be another bit class.
MIN_HEAD_ROWS = 8
# Prompt tokens whose logits are in memory at a time while a prompt is scored.
SCORE_ROWS = 64

ForwardResult = tuple[KVCache, Float[Array, "B Q V"]]


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
      drafting: this step's drafts, where Q > 1.
      model: the Linen module.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
    """
    rows, decodes_B = decoding_rows(slots, packed, layout, bucket)
    tokens_BQ = rows.last_token_B[:, None]
    length_B = decodes_B.astype(jnp.int32)
    if drafting is not None:
        drafts_BK = jnp.where(decodes_B[:, None], drafting.drafts_BK[:bucket], -1)
        tokens_BQ = jnp.concatenate([tokens_BQ, drafts_BK], axis=1)
        length_B += jnp.sum(drafts_BK >= 0, axis=1)
    order_Q = jnp.arange(tokens_BQ.shape[1], dtype=jnp.int32)
    is_valid_BQ = order_Q < length_B[:, None]
    inputs = ModelInputs(
        tokens_BT=jnp.where(is_valid_BQ, tokens_BQ, 0),
        positions_BT=jnp.where(is_valid_BQ, rows.position_B[:, None] + order_Q, 0),
        query_len_B=length_B,
        context_len_B=jnp.where(decodes_B, rows.position_B + length_B, 0),
        page_tables=(rows.page_table_BM,) * len(kv_cache),
    )
    with rows_up_to(layout.num_slots * tokens_BQ.shape[1]):
        output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
        new_BQV = model.apply(
            {"params": params}, output.hidden_BTD, length_B, method="logits"
        )
    return kv_cache, logits_BQV.at[:bucket].set(new_BQV)


def prefill_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    *,
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
) -> ForwardResult:
    """One chunk of up to `shape[0]` prompts; arguments as for `decode_forward`.

    A row with the last chunk of its prompt writes its last token's logits to its
    slot's row, and to those of its forks. The slot state is not needed: a chunk brings
    its own page table.
    """
    del slots
    hidden_RTD, kv_cache = _fill(params, kv_cache, packed, model, layout, shape)
    logits_BQV = _write_last(params, logits_BQV, hidden_RTD, packed, model, layout)
    return kv_cache, logits_BQV


def score_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    *,
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
    num_top: int,
) -> tuple[KVCache, Float[Array, "B Q V"], TokenScores]:
    """Like `prefill_forward`, and tells how likely each next prompt token was.

    The head sees `SCORE_ROWS` tokens at a time, so T x V logits are never in memory.

    Returns:
      Also, per row and token, the scores [R, T] of the token that follows it;
      meaningless where none does.
    """
    del slots
    R, T = shape
    hidden_RTD, kv_cache = _fill(params, kv_cache, packed, model, layout, shape)
    logits_BQV = _write_last(params, logits_BQV, hidden_RTD, packed, model, layout)
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

    return kv_cache, logits_BQV, jax.tree.map(unblocked, scores)


def logits_row(logits_BQV: Float[Array, "B Q V"], row: Array) -> Float[Array, " V"]:
    """One row of logits, for a host that wants all of them."""
    return logits_BQV[row, 0]


def _fill(
    params: Params,
    kv_cache: KVCache,
    packed: Int[Array, " W"],
    model: Any,
    layout: PackedLayout,
    shape: tuple[int, int],
) -> tuple[Float[Array, "R T D"], KVCache]:
    """Applies the model to a prefill call's chunks."""
    R, T = shape
    rows = layout.rows(packed)[:R]
    start_R, length_R = layout.field(rows, "start"), layout.field(rows, "length")
    inputs = ModelInputs(
        tokens_BT=layout.tokens(packed, R, T),
        positions_BT=start_R[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :],
        query_len_B=length_R,
        context_len_B=jnp.where(length_R > 0, start_R + length_R, 0),
        page_tables=(layout.page_table(rows),) * len(kv_cache),
    )
    with rows_up_to(layout.max_tokens):
        output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
    return output.hidden_BTD, kv_cache


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
    rows = layout.rows(packed)
    last_R = jnp.maximum(layout.field(rows[:R], "length") - 1, 0)
    hidden_RD = hidden_RTD[jnp.arange(R), last_R]
    hidden_RD = jnp.pad(hidden_RD, ((0, max(0, MIN_HEAD_ROWS - R)), (0, 0)))
    with rows_up_to(layout.max_tokens):
        new_RV = model.apply({"params": params}, hidden_RD, method="logits")[:R]
    # A fork takes its leader's row, a chunk its own.
    source_W, index_W = layout.field(rows, "source"), jnp.arange(rows.shape[0])
    is_mine_W = (layout.field(rows, "is_last") == 1) | (source_W > 0)
    taken_W = jnp.where(source_W > 0, source_W - 1, jnp.minimum(index_W, R - 1))
    slot_W = jnp.where(is_mine_W, layout.field(rows, "slot"), layout.num_slots)
    return logits_BQV.at[slot_W, 0].set(new_RV[taken_W], mode="drop")
