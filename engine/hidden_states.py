"""The target's hidden states, kept from a pass for the proposer of the next step.

One for each token that the pass gave (`Drafting.num_new_B`): heads go on from there.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from headrace.engine.drafting import Drafting
from headrace.engine.proposer import FillStep
from headrace.engine.slots import SlotState, apply_packed
from headrace.engine.step_inputs import ending_prompts


def keep_all(
    drafting: Drafting, rows: SlotState, hidden_BQD: Float[Array, "B Q D"]
) -> Drafting:
    """The state (donated) with the hidden states of a pass over active rows."""
    assert drafting.hidden_BQD is not None
    row_B = jnp.where(rows.active_B, rows.extra_row_B, drafting.num_new_B.shape[0])
    kept_BQD = drafting.hidden_BQD.at[row_B].set(hidden_BQD, mode="drop")
    return dataclasses.replace(drafting, hidden_BQD=kept_BQD)


def keep_last(
    drafting: Drafting, step: FillStep, hidden_RTD: Float[Array, "R T D"]
) -> Drafting:
    """The state (donated) with the last hidden states of prompts that end here."""
    assert drafting.hidden_BQD is not None
    last_RD, taken_W, slot_W = ending_prompts(hidden_RTD, step.packed, step.layout)
    slots, _ = apply_packed(step.slots, step.packed, step.layout)
    row_W = jnp.append(slots.extra_row_B, step.layout.num_slots)[slot_W]
    kept_BQD = drafting.hidden_BQD.at[row_W, 0].set(last_RD[taken_W], mode="drop")
    return dataclasses.replace(drafting, hidden_BQD=kept_BQD)
