"""The second pure program of a step: turns logits rows into tokens.

Every row is sampled from its own logits, counts, biases, mask and seed, so company
changes nothing; then the slots advance, and rows that are done end here, without the
host. See steps.py for the program that comes before.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.configs.drafts import Acceptance
from headrace.engine import sampler
from headrace.engine.draft_sampling import filters_of
from headrace.engine.drafting import Drafting, add_tokens, begin_step, learn
from headrace.engine.logprobs import TokenScores, token_scores
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras, count_tokens, process
from headrace.engine.rejection import accept_or_resample
from headrace.engine.sampling_params import SampleVariant
from headrace.engine.schedule import (
    FINISH_LENGTH,
    FINISH_RUNNING,
    FINISH_STOP,
    FINISH_STUCK,
)
from headrace.engine.slots import SlotState, apply_packed
from headrace.pallas_kernels.gpu_target import gpu_capability


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What the host reads of a step, rows by slot; `scores` where asked for.

    With drafts every array has a leading axis Q: the row's tokens in order. Then
    `live_B` says which rows got one, `is_draft_B` which were drafted; a row's later
    places follow from accepted drafts.
    """

    token_B: Int[Array, " B"]
    finish_B: Int[Array, " B"]
    scores: TokenScores | None = None
    live_B: Bool[Array, " B"] | None = None
    is_draft_B: Bool[Array, " B"] | None = None


SampleResult = tuple[SlotState, StepOutput, Extras | None, Drafting | None]


def sample(
    slots: SlotState,
    logits_BQV: Float[Array, "B Q V"],
    packed: Int[Array, " W"],
    extras: Extras | None = None,
    mask_BW: Int[Array, "B W"] | None = None,
    drafting: Drafting | None = None,
    *,
    layout: PackedLayout,
    bucket: int,
    variant: SampleVariant,
    num_top: int,
    acceptance: Acceptance = "exact",
) -> SampleResult:
    """Samples for every slot below `bucket` that has new logits, and advances it.

    Args:
      slots: donated; state before this step's changes.
      logits_BQV: written by this step's `forward` calls.
      packed: this step's changes.
      extras: donated, for "full" alone.
      mask_BW: for "full" alone: bit i % 32 of word i // 32 lets id i be sampled, where
        a row has processed logits.
      drafting: donated, where Q > 1. A row goes on to its next place as long as its
        token is the draft there.
      layout: where the fields of `packed` lie.
      bucket: rows of this program.
      variant: "greedy", "sampled" (adds noise and filters), or "full" (adds
        penalties, biases, masks and log-probabilities). A row gives the same token in
        each that can serve it.
      num_top: log-probabilities per token that "full" returns.
      acceptance: how a draft comes to be a row's token, see EngineConfig.
    """
    slots, fresh_B = apply_packed(slots, packed, layout)
    rows = jax.tree.map(lambda leaf: leaf[:bucket], slots)
    does_decode, does_draft = layout.does_decode(packed), layout.does_draft(packed)
    # Active rows that do not decode in this step have no new logits.
    live_B = rows.active_B & (fresh_B[:bucket] | does_decode)
    one_place = functools.partial(
        _sample_place,
        mask_BW=None if mask_BW is None else mask_BW[:bucket],
        variant=variant,
        num_top=num_top,
        rejects=acceptance == "rejection",
    )
    if drafting is None:
        state = _State(rows=rows, extras=extras, drafting=None, live_B=live_B)
        state, output = one_place(state, _Place(raw_BV=logits_BQV[:bucket, 0]))
    else:
        drafting = begin_step(drafting, rows, live_B, fresh_B[:bucket] | does_draft)
        drafts_BK = jnp.where(fresh_B[:, None] | ~does_draft, -1, drafting.drafts_BK)
        drafting = dataclasses.replace(drafting, drafts_BK=drafts_BK)
        state = _State(rows=rows, extras=extras, drafting=drafting, live_B=live_B)
        state, output = _follow_drafts(state, logits_BQV[:bucket], one_place)
    return _put_back(slots, state.rows), output, state.extras, state.drafting


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
    """What sampling a token changes: rows of the bucket, and who samples at all."""

    rows: SlotState
    extras: Extras | None
    drafting: Drafting | None
    live_B: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Logits of a place, its drafts (-1: none) and what these were drawn from."""

    raw_BV: Float[Array, "B V"]
    draft_B: Int[Array, " B"] | None = None
    weights_BV: Float[Array, "B V"] | None = None


def _sample_place(
    state: _State,
    place: _Place,
    *,
    mask_BW: Int[Array, "B W"] | None,
    variant: SampleVariant,
    num_top: int,
    rejects: bool,
) -> tuple[_State, StepOutput]:
    """One token of each live row, from its own logits."""
    rows, extras, drafting, raw_BV = (
        state.rows, state.extras, state.drafting, place.raw_BV
    )  # fmt: skip
    z_BV = raw_BV
    if variant == "full":
        assert extras is not None and mask_BW is not None
        # Most steps have nothing to process; it changes no bit where it is skipped.
        z_BV = jax.lax.cond(
            jnp.any(rows.has_extras_B),
            process,
            lambda z, *_: z,
            *(raw_BV, rows, extras, mask_BW),
        )
    if variant == "greedy":
        token_B = sampler.sample_greedy(z_BV)
    else:
        counters = {"seed_B2": rows.seed_B2, "position_B": rows.position_B + 1}
        token_B = sampler.sample_tokens(z_BV, **counters, **filters_of(rows))
        if rejects and place.draft_B is not None:
            score_BV = sampler.filtered_scores(z_BV, **filters_of(rows))
            drafts = place.draft_B, place.weights_BV
            taken_B = accept_or_resample(score_BV, *drafts, **counters)
            token_B = jnp.where(place.draft_B >= 0, taken_B, token_B)
    scores, is_stuck_B = None, jnp.zeros(token_B.shape, bool)
    if variant == "full":
        assert extras is not None
        is_stuck_B = z_BV.max(-1) == -jnp.inf  # parameters forbid every token
        extras = count_tokens(extras, rows, token_B, state.live_B)
        scores = token_scores(raw_BV, token_B, num_top)
    if drafting is not None:
        drafting = add_tokens(drafting, rows, token_B, state.live_B)
    rows, finish_B = _advance(rows, token_B, state.live_B, is_stuck_B)
    state = _State(rows=rows, extras=extras, drafting=drafting, live_B=state.live_B)
    return state, StepOutput(token_B=token_B, finish_B=finish_B, scores=scores)


def _follow_drafts(
    state: _State,
    logits_BQV: Float[Array, "B Q V"],
    one_place: Callable[..., tuple[_State, StepOutput]],
) -> tuple[_State, StepOutput]:
    """Samples place by place, as if each were its own step, while drafts are right.

    The token at a place is what the target samples there, whatever was drafted; the
    draft only says whether the logits of the next place are those of this text.
    """
    assert state.drafting is not None
    drafts_BK = state.drafting.drafts_BK[: logits_BQV.shape[0]]
    weights_BKV = state.drafting.weights_BKV
    K = drafts_BK.shape[1]

    def place_of(index: Int[Array, ""]) -> _Place:
        def at(array: Array, index: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(array, index, 1, keepdims=False)
            return row[: logits_BQV.shape[0]]

        draft_B = jnp.where(index < K, at(drafts_BK, jnp.minimum(index, K - 1)), -1)
        weights_BV = None
        if weights_BKV is not None:
            weights_BV = at(weights_BKV, jnp.minimum(index, K - 1))
        raw_BV = at(logits_BQV, index)
        return _Place(raw_BV=raw_BV, draft_B=draft_B, weights_BV=weights_BV)

    nobody_B = jnp.zeros_like(state.live_B)
    state, first = one_place(state, place_of(jnp.int32(0)))
    first = dataclasses.replace(first, live_B=state.live_B, is_draft_B=nobody_B)

    def follow(carry: Any, draft: Any) -> tuple[Any, StepOutput]:
        state, token_B, finish_B = carry
        index, draft_B = draft
        is_right_B = (token_B == draft_B) & (finish_B == FINISH_RUNNING)
        state = dataclasses.replace(state, live_B=state.live_B & is_right_B)

        def nothing(state: _State, place: _Place) -> tuple[_State, StepOutput]:
            del place
            zeros = jax.tree.map(jnp.zeros_like, first)
            return state, dataclasses.replace(zeros, live_B=None, is_draft_B=None)

        state, output = jax.lax.cond(
            jnp.any(state.live_B), one_place, nothing, state, place_of(index)
        )
        output = dataclasses.replace(
            output, live_B=state.live_B, is_draft_B=draft_B >= 0
        )
        return (state, output.token_B, output.finish_B), output

    later: StepOutput
    # On a GPU written out: a loop around branches would leave the command buffer.
    places_K = 1 + jnp.arange(K, dtype=jnp.int32)
    carry: Any = (state, first.token_B, first.finish_B)
    (state, *_), later = jax.lax.scan(
        follow, carry, (places_K, drafts_BK.T), unroll=gpu_capability() is not None
    )
    output = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, later)
    assert later.live_B is not None and state.drafting is not None
    drafting = learn(
        state.drafting,
        state.rows,
        jnp.sum(later.live_B, axis=0),
        jnp.sum(drafts_BK >= 0, axis=1),
    )
    return dataclasses.replace(state, drafting=drafting), output


def _advance(
    rows: SlotState,
    token_B: Int[Array, " B"],
    live_B: Array,
    is_stuck_B: Array,
) -> tuple[SlotState, Int[Array, " B"]]:
    """Stores the tokens of live rows and ends those that are done."""
    remaining_B = rows.remaining_B - live_B
    is_stop_B = jnp.any(rows.stop_ids_BS == token_B[:, None], axis=1)
    length_B = jnp.where(remaining_B <= 0, FINISH_LENGTH, FINISH_RUNNING)
    finish_B = jnp.where(is_stop_B, FINISH_STOP, length_B)
    finish_B = jnp.where(is_stuck_B, FINISH_STUCK, finish_B)
    finish_B = jnp.where(live_B, finish_B, FINISH_RUNNING).astype(jnp.int32)
    rows = dataclasses.replace(
        rows,
        last_token_B=jnp.where(live_B, token_B, rows.last_token_B),
        position_B=rows.position_B + live_B,
        remaining_B=remaining_B,
        active_B=rows.active_B & (finish_B == FINISH_RUNNING),
    )
    return rows, finish_B


def _put_back(slots: SlotState, rows: SlotState) -> SlotState:
    """The slots with what sampling changes of their first rows."""
    bucket = rows.active_B.shape[0]
    return dataclasses.replace(
        slots,
        last_token_B=slots.last_token_B.at[:bucket].set(rows.last_token_B),
        position_B=slots.position_B.at[:bucket].set(rows.position_B),
        remaining_B=slots.remaining_B.at[:bucket].set(rows.remaining_B),
        active_B=slots.active_B.at[:bucket].set(rows.active_B),
    )
