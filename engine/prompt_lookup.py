"""The proposer without a model: what followed the last few tokens where they stood.

A draft of it costs no weights.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from headrace.engine.drafting import Drafting
from headrace.engine.proposer import Drafts, DraftStep, Proposer
from headrace.layers.inputs import KVCache, Params

# Tokens that must have stood before, at most; the more the better.
LONGEST_MATCH = 3


@dataclasses.dataclass(frozen=True)
class PromptLookup(Proposer):
    """See `Proposer`. Source: Saxena 2023, prompt lookup decoding."""

    def draft(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: DraftStep
    ) -> tuple[KVCache, Drafts]:
        """As `Proposer.draft`."""
        del params
        rows, num_drafts = step.rows, step.layout.num_drafts
        history_BL = drafting.history_BL[rows.extra_row_B]
        found_BK, has_match_B = look_up(history_BL, rows.position_B, num_drafts)
        return kv_cache, Drafts(jnp.where(has_match_B[:, None], found_BK, -1))


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
