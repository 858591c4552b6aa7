"""Draws drafts from a proposer's logits, with the noise that the target will use."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine import sampler
from headrace.engine.processors import Extras, process
from headrace.engine.slots import SlotState


def draw_draft(
    z_BV: Float[Array, "B V"],
    rows: SlotState,
    extras: Extras,
    place_B: Int[Array, " B"],
    *,
    wants_weights: bool,
) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
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
