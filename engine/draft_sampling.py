"""Draws drafts from a proposer's logits, with the noise that the target will use.

Alone, or each from the one before.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine import sampler
from headrace.engine.processors import Extras, process
from headrace.engine.proposer import Drafts
from headrace.engine.slots import SlotState
from headrace.pallas_kernels.gpu_target import gpu_capability

# A draft of each row, and `Drafting.weights_BKV` of it where that is kept.
Drawn = tuple[Int[Array, " B"], Float[Array, "B V"] | None]


def draw_draft(
    z_BV: Float[Array, "B V"],
    rows: SlotState,
    extras: Extras,
    place_B: Int[Array, " B"],
    *,
    wants_weights: bool,
) -> Drawn:
    """The draft behind the tokens at `place_B`, as the target would sample it.

    With the row's own parameters and the same noise as the target will use, so that
    both choose alike where they agree. Counts are those before the drafts.

    Args:
      z_BV: the proposer's logits.
      rows: the slots in question.
      extras: of all slots.
      place_B: position of the token before the draft.
      wants_weights: also tell the distribution.

    Returns:
      Token ids, and `sampler.filtered_scores` of what they were drawn from.

    Source: Daliri et al. 2024 (drafts that are coupled by Gumbel noise).
    """
    rows = dataclasses.replace(rows, position_B=place_B)
    allows_all = jnp.full((z_BV.shape[0], -(-z_BV.shape[1] // 32)), -1, jnp.int32)
    z_BV = jax.lax.cond(
        jnp.any(rows.has_extras_B),
        process,
        lambda z, *_: z,
        *(z_BV, rows, extras, allows_all),
    )
    token_B = sampler.sample_tokens(
        z_BV, seed_B2=rows.seed_B2, position_B=place_B + 1, **filters_of(rows)
    )
    weights_BV = None
    if wants_weights:
        weights_BV = sampler.filtered_scores(z_BV, **filters_of(rows))
    # Where a model gives no numbers, any id will do.
    return jnp.minimum(token_B, z_BV.shape[1] - 1), weights_BV


def filters_of(rows: SlotState) -> dict[str, Array]:
    """Temperature and filters, as `sampler.sample_tokens` names them."""
    return {
        "temperature_B": rows.temperature_B,
        "top_k_B": rows.top_k_B,
        "top_p_B": rows.top_p_B,
        "min_p_B": rows.min_p_B,
    }


def draw_chain(
    first: tuple[Any, Drawn],
    next_draft: Callable[[Any, Array, Array], tuple[Any, Drawn]],
    num_drafts: int,
) -> tuple[Any, Drafts]:
    """Drafts that each follow from the one before.

    Args:
      first: what the next needs, and the first draft.
      next_draft: of that, the draft before [B] and the draft's index.
      num_drafts: K.

    Returns:
      What is left of the former, and all drafts.
    """
    state, drawn = first

    def follow(carry: Any, index: Array) -> tuple[Any, Drawn]:
        state, token_B = carry
        state, drawn = next_draft(state, token_B, index)
        return (state, drawn[0]), drawn

    begun: Any = (state, drawn[0])
    # On a GPU written out: a loop would leave the command buffer.
    (state, _), later = jax.lax.scan(
        follow,
        begun,
        jnp.arange(1, num_drafts, dtype=jnp.int32),
        unroll=gpu_capability() is not None,
    )
    found_BK, weights_BKV = jax.tree.map(
        lambda a, b: jnp.swapaxes(jnp.concatenate([a[None], b]), 0, 1), drawn, later
    )
    return state, Drafts(found_BK, weights_BKV)
