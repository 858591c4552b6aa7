"""The two pure programs of a step: `forward` (decode or prefill) and `sample`.

`forward` applies the model to a bucket's rows, writes KV pages and the logits rows it
owns. `sample` turns logits rows into tokens and advances the slots. Both are plain
functions; model_runner compiles them, and so can a notebook cell.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine import sampler
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras, count_tokens, process
from headrace.engine.sampling_params import SampleVariant
from headrace.engine.schedule import FINISH_LENGTH, FINISH_RUNNING, FINISH_STOP
from headrace.engine.slots import SlotState, apply_packed
from headrace.layers.inputs import KVCache, ModelInputs, Params

# The head always sees at least this many rows: fewer would be another bit class.
MIN_HEAD_ROWS = 8

ForwardResult = tuple[KVCache, Float[Array, "B Q V"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the host reads of a step, rows by slot; None where not asked for."""

    token_B: Int[Array, " B"]
    finish_B: Int[Array, " B"]
    logprob_B: Float[Array, " B"] | None = None
    rank_B: Int[Array, " B"] | None = None
    top_ids_BJ: Int[Array, "B J"] | None = None
    top_logprobs_BJ: Float[Array, "B J"] | None = None


def decode_forward(
    params: Params,
    kv_cache: KVCache,
    logits_BQV: Float[Array, "B Q V"],
    slots: SlotState,
    packed: Int[Array, " W"],
    *,
    model: Any,
    layout: PackedLayout,
    bucket: int,
) -> ForwardResult:
    """One token for each active slot below `bucket`.

    Args:
      params: the model's nested dict.
      kv_cache: donated.
      logits_BQV: donated; the bucket's rows are replaced. Within a step prefill comes
        after, and no row outlives its step.
      slots: state before this step's changes.
      packed: this step's changes.
      model: the Linen module.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
    """
    slots, fresh_B = apply_packed(slots, packed, layout)
    rows = jax.tree.map(lambda leaf: leaf[:bucket], slots)
    decodes_B = rows.active_B & ~fresh_B[:bucket]
    inputs = ModelInputs(
        tokens_BT=jnp.where(decodes_B, rows.last_token_B, 0)[:, None],
        positions_BT=jnp.where(decodes_B, rows.position_B, 0)[:, None],
        query_len_B=decodes_B.astype(jnp.int32),
        context_len_B=jnp.where(decodes_B, rows.position_B + 1, 0),
        page_tables=(rows.page_table_BM,),
    )
    output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
    new_BV = model.apply({"params": params}, output.hidden_BTD[:, 0], method="logits")
    return kv_cache, logits_BQV.at[:bucket, 0].set(new_BV)


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
    R, T = shape
    all_rows = layout.rows(packed)
    rows = all_rows[:R]
    start_R, length_R = layout.field(rows, "start"), layout.field(rows, "length")
    inputs = ModelInputs(
        tokens_BT=layout.tokens(packed, R, T),
        positions_BT=start_R[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :],
        query_len_B=length_R,
        context_len_B=jnp.where(length_R > 0, start_R + length_R, 0),
        page_tables=(layout.page_table(rows),),
    )
    output, kv_cache = model.apply({"params": params}, kv_cache, inputs)
    last_R = jnp.maximum(length_R - 1, 0)
    hidden_RD = output.hidden_BTD[jnp.arange(R), last_R]
    hidden_RD = jnp.pad(hidden_RD, ((0, max(0, MIN_HEAD_ROWS - R)), (0, 0)))
    new_RV = model.apply({"params": params}, hidden_RD, method="logits")[:R]
    is_last_R = layout.field(rows, "is_last") == 1
    slot_R = jnp.where(is_last_R, layout.field(rows, "slot"), layout.num_slots)
    logits_BQV = logits_BQV.at[slot_R, 0].set(new_RV, mode="drop")
    source_W = layout.field(all_rows, "source")
    slot_W = jnp.where(source_W > 0, layout.field(all_rows, "slot"), layout.num_slots)
    forked_WV = new_RV[jnp.maximum(source_W - 1, 0)]
    return kv_cache, logits_BQV.at[slot_W, 0].set(forked_WV, mode="drop")


def sample(
    slots: SlotState,
    logits_BQV: Float[Array, "B Q V"],
    packed: Int[Array, " W"],
    extras: Extras | None = None,
    *,
    layout: PackedLayout,
    bucket: int,
    variant: SampleVariant,
    num_top: int,
) -> tuple[SlotState, StepOutput, Extras | None]:
    """Samples for every slot below `bucket` that has new logits, and advances it.

    Args:
      slots: donated; state before this step's changes.
      logits_BQV: written by this step's `forward` calls.
      packed: this step's changes.
      extras: donated, for "full" alone.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
      variant: "greedy", "sampled" (adds noise and filters), or "full" (adds
        penalties, biases and log-probabilities). A row gives the same token in each
        that can serve it.
      num_top: log-probabilities per token that "full" returns.
    """
    slots, fresh_B = apply_packed(slots, packed, layout)
    rows = jax.tree.map(lambda leaf: leaf[:bucket], slots)
    # Active rows that do not decode in this step have no new logits.
    live_B = rows.active_B & (fresh_B[:bucket] | (layout.does_decode(packed) == 1))
    z_BV = raw_BV = logits_BQV[:bucket, 0]
    if variant == "full":
        assert extras is not None
        # Most steps have nothing to process; it changes no bit where it is skipped.
        z_BV = jax.lax.cond(
            jnp.any(rows.has_extras_B), process, lambda z, *_: z, raw_BV, rows, extras
        )
    if variant == "greedy":
        token_B = sampler.sample_greedy(z_BV)
    else:
        token_B = sampler.sample_tokens(
            z_BV,
            seed_B2=rows.seed_B2,
            position_B=rows.position_B + 1,
            temperature_B=rows.temperature_B,
            top_k_B=rows.top_k_B,
            top_p_B=rows.top_p_B,
            min_p_B=rows.min_p_B,
        )
    slots, finish_B = _advance(slots, rows, token_B, live_B)
    output = StepOutput(token_B=token_B, finish_B=finish_B)
    if variant == "full":
        assert extras is not None
        extras = count_tokens(extras, rows, token_B, live_B)
        logprob_B, rank_B, ids_BJ, top_BJ = sampler.token_logprobs(
            raw_BV, token_B, num_top
        )
        output = dataclasses.replace(
            output,
            logprob_B=logprob_B,
            rank_B=rank_B,
            top_ids_BJ=ids_BJ,
            top_logprobs_BJ=top_BJ,
        )
    return slots, output, extras


def _advance(
    slots: SlotState,
    rows: SlotState,
    token_B: Int[Array, " B"],
    live_B: Array,
) -> tuple[SlotState, Int[Array, " B"]]:
    """Stores the tokens of live rows and ends those that are done."""
    bucket = token_B.shape[0]
    remaining_B = rows.remaining_B - live_B
    is_stop_B = jnp.any(rows.stop_ids_BS == token_B[:, None], axis=1)
    length_B = jnp.where(remaining_B <= 0, FINISH_LENGTH, FINISH_RUNNING)
    finish_B = jnp.where(is_stop_B, FINISH_STOP, length_B)
    finish_B = jnp.where(live_B, finish_B, FINISH_RUNNING).astype(jnp.int32)
    last_B = jnp.where(live_B, token_B, rows.last_token_B)
    active_B = rows.active_B & (finish_B == FINISH_RUNNING)
    slots = dataclasses.replace(
        slots,
        last_token_B=slots.last_token_B.at[:bucket].set(last_B),
        position_B=slots.position_B.at[:bucket].set(rows.position_B + live_B),
        remaining_B=slots.remaining_B.at[:bucket].set(remaining_B),
        active_B=slots.active_B.at[:bucket].set(active_B),
    )
    return slots, finish_B
