"""The second pure program of a step: turns logits rows into tokens.

Every row is sampled from its own logits, counts, biases, mask and seed, so company
changes nothing; then the slots advance, and rows that are done end here, without the
host. See steps.py for the program that comes before.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine import sampler
from headrace.engine.logprobs import TokenScores, token_scores
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras, count_tokens, process
from headrace.engine.sampling_params import SampleVariant
from headrace.engine.schedule import (
    FINISH_LENGTH,
    FINISH_RUNNING,
    FINISH_STOP,
    FINISH_STUCK,
)
from headrace.engine.slots import SlotState, apply_packed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the host reads of a step, rows by slot; `scores` where asked for."""

    token_B: Int[Array, " B"]
    finish_B: Int[Array, " B"]
    scores: TokenScores | None = None


def sample(
    slots: SlotState,
    logits_BQV: Float[Array, "B Q V"],
    packed: Int[Array, " W"],
    extras: Extras | None = None,
    mask_BW: Int[Array, "B W"] | None = None,
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
      mask_BW: for "full" alone: bit i % 32 of word i // 32 lets id i be sampled, where
        a row has processed logits.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
      variant: "greedy", "sampled" (adds noise and filters), or "full" (adds
        penalties, biases, masks and log-probabilities). A row gives the same token in
        each that can serve it.
      num_top: log-probabilities per token that "full" returns.
    """
    slots, fresh_B = apply_packed(slots, packed, layout)
    rows = jax.tree.map(lambda leaf: leaf[:bucket], slots)
    # Active rows that do not decode in this step have no new logits.
    live_B = rows.active_B & (fresh_B[:bucket] | (layout.does_decode(packed) == 1))
    z_BV = raw_BV = logits_BQV[:bucket, 0]
    if variant == "full":
        assert extras is not None and mask_BW is not None
        # Most steps have nothing to process; it changes no bit where it is skipped.
        z_BV = jax.lax.cond(
            jnp.any(rows.has_extras_B),
            process,
            lambda z, *_: z,
            *(raw_BV, rows, extras, mask_BW[:bucket]),
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
    scores, is_stuck_B = None, jnp.zeros(bucket, bool)
    if variant == "full":
        assert extras is not None
        is_stuck_B = z_BV.max(-1) == -jnp.inf  # parameters forbid every token
        extras = count_tokens(extras, rows, token_B, live_B)
        scores = token_scores(raw_BV, token_B, num_top)
    slots, finish_B = _advance(slots, rows, token_B, live_B, is_stuck_B)
    output = StepOutput(token_B=token_B, finish_B=finish_B, scores=scores)
    return slots, output, extras


def _advance(
    slots: SlotState,
    rows: SlotState,
    token_B: Int[Array, " B"],
    live_B: Array,
    is_stuck_B: Array,
) -> tuple[SlotState, Int[Array, " B"]]:
    """Stores the tokens of live rows and ends those that are done."""
    bucket = token_B.shape[0]
    remaining_B = rows.remaining_B - live_B
    is_stop_B = jnp.any(rows.stop_ids_BS == token_B[:, None], axis=1)
    length_B = jnp.where(remaining_B <= 0, FINISH_LENGTH, FINISH_RUNNING)
    finish_B = jnp.where(is_stop_B, FINISH_STOP, length_B)
    finish_B = jnp.where(is_stuck_B, FINISH_STUCK, finish_B)
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
