"""Drafts of a step's next tokens, by the text so far: prompt lookup.

What followed the last few tokens where they stood before is drafted again; one pass of
the target then tells how much of it is right (steps.decode_forward, sample_step). A
draft costs no weights, and a wrong one changes no token. All of it runs on the device,
since the host lacks the tokens of the step before when it dispatches the next.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from headrace.engine.packed_layout import PackedLayout
from headrace.engine.request import Request
from headrace.engine.slots import SlotState, decoding_rows

# Tokens that must have stood before, at most; the more the better.
LONGEST_MATCH = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What drafting keeps between steps.

    Attributes:
      history_BL: tokens by position, prompt and output; a slot's row is
        `SlotState.extra_row_B`.
      drafts_BK: by slot, the drafts of this step in order, -1 where there is none.
    """

    history_BL: Int[Array, "B L"]
    drafts_BK: Int[Array, "B K"]


def empty_drafting(layout: PackedLayout) -> Drafting:
    """No tokens and no drafts."""
    B = layout.num_slots
    return Drafting(
        history_BL=jnp.zeros((B, layout.max_context_len), jnp.int32),
        drafts_BK=jnp.full((B, layout.num_drafts), -1, jnp.int32),
    )


def history_of(request: Request, layout: PackedLayout) -> np.ndarray:
    """[L] a request's tokens so far, then zeros."""
    tokens_L = np.zeros(layout.max_context_len, np.int32)
    known = request.tokens(0, request.max_len)
    tokens_L[: len(known)] = known
    return tokens_L


def set_history(
    drafting: Drafting, row: Int[Array, ""], tokens_L: Int[Array, " L"]
) -> Drafting:
    """The state (donated) with one row's tokens replaced."""
    history_BL = drafting.history_BL.at[row].set(tokens_L)
    return dataclasses.replace(drafting, history_BL=history_BL)


def add_tokens(
    drafting: Drafting,
    rows: SlotState,
    token_B: Int[Array, " B"],
    live_B: Bool[Array, " B"],
) -> Drafting:
    """The state (donated) after live rows have sampled tokens for `position_B` + 1."""
    L = drafting.history_BL.shape[1]
    place_B = jnp.where(live_B, rows.position_B + 1, L)
    history_BL = drafting.history_BL.at[rows.extra_row_B, place_B].set(
        token_B, mode="drop"
    )
    return dataclasses.replace(drafting, history_BL=history_BL)


def propose(
    drafting: Drafting,
    slots: SlotState,
    packed: Int[Array, " W"],
    *,
    layout: PackedLayout,
    bucket: int,
) -> Drafting:
    """The state (donated) with drafts for the rows that decode in this step.

    Args:
      drafting: with the tokens of all steps before.
      slots: state before this step's changes.
      packed: this step's changes.
      layout: where the fields of `packed` lie.
      bucket: rows of the decode call.
    """
    rows, decodes_B = decoding_rows(slots, packed, layout, bucket)
    # One of the tokens that are left is the target's own.
    most_B = jnp.minimum(rows.max_drafts_B, rows.remaining_B - 1)
    history_BL = drafting.history_BL[rows.extra_row_B]
    found_BK, has_match_B = look_up(history_BL, rows.position_B, layout.num_drafts)
    order_K = jnp.arange(layout.num_drafts, dtype=jnp.int32)
    is_draft_BK = (decodes_B & has_match_B)[:, None] & (order_K < most_B[:, None])
    drafts_BK = jnp.full_like(drafting.drafts_BK, -1)
    drafts_BK = drafts_BK.at[:bucket].set(jnp.where(is_draft_BK, found_BK, -1))
    return dataclasses.replace(drafting, drafts_BK=drafts_BK)


def look_up(
    history_BL: Int[Array, "B L"], position_B: Int[Array, " B"], num_drafts: int
) -> tuple[Int[Array, "B K"], Bool[Array, " B"]]:
    """What followed the last tokens where they stood before.

    The place that agrees in most tokens, up to LONGEST_MATCH, wins; among equals the
    latest. Where the text since then is shorter than the drafts, it is repeated: after
    "a b a" come b, a, b, a.

    Args:
      history_BL: tokens by position.
      position_B: of the last token.
      num_drafts: K.

    Returns:
      Drafts, and whether there are any.

    Source: Saxena 2023, prompt lookup decoding.
    """
    B, L = history_BL.shape
    place_L = jnp.arange(L, dtype=jnp.int32)
    is_before_BL = place_L < position_B[:, None]
    agrees_BL, length_BL = is_before_BL, jnp.zeros((B, L), jnp.int32)
    for back in range(LONGEST_MATCH):
        at_B1 = jnp.maximum(position_B - back, 0)[:, None]
        last_B1 = jnp.take_along_axis(history_BL, at_B1, axis=1)
        shifted_BL = jnp.roll(history_BL, back, axis=1)
        agrees_BL &= (shifted_BL == last_B1) & (place_L >= back)
        length_BL += agrees_BL
    rank_BL = jnp.where(length_BL > 0, length_BL * L + place_L, -1)
    best_B = jnp.argmax(rank_BL, axis=1).astype(jnp.int32)
    period_B = jnp.maximum(position_B - best_B, 1)
    order_K = jnp.arange(num_drafts, dtype=jnp.int32)
    from_BK = best_B[:, None] + 1 + order_K % period_B[:, None]
    drafts_BK = jnp.take_along_axis(history_BL, jnp.minimum(from_BK, L - 1), axis=1)
    return drafts_BK, rank_BL.max(axis=1) >= 0
