"""What a proposer is, and the program that asks it.

A proposer drafts a step's next tokens; one pass of the target then tells how much of it
is right (steps.decode_forward, sample_step). A wrong draft changes no token. All of it
runs on the device, since the host lacks the tokens of the step before when it
dispatches the next. proposers.py says which there are.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.drafting import Drafting, most_drafts, with_drafts
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras
from headrace.engine.slots import SlotState, decoding_rows
from headrace.layers.inputs import KVCache, ModelInputs, ModelOutput, Params

# The name of a proposer's own parameters among those of its target.
DRAFT = "draft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftStep:
    """What a proposer sees of a decode step.

    Attributes:
      rows: of the decode bucket, after the step's changes.
      most_B: drafts that each may take; 0 for those that take none.
      extras: counts and biases of all slots.
      layout: of the engine.
      wants_weights: drafts come with `Drafting.weights_BKV`, if they are drawn.
    """

    rows: SlotState
    most_B: Int[Array, " B"]
    extras: Extras
    layout: PackedLayout
    wants_weights: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class FillStep:
    """What a proposer sees of a prefill call.

    Attributes:
      slots: state before the step's changes.
      packed: the step's changes.
      inputs: of the target, with a page table for every KV group of the cache.
      output: of the target, [R, T, D].
      layout: where the fields of `packed` lie.
    """

    slots: SlotState
    packed: Int[Array, " W"]
    inputs: ModelInputs
    output: ModelOutput
    layout: PackedLayout


class Drafts(NamedTuple):
    """Drafts in order, -1 where there is none, and `Drafting.weights_BKV` of them."""

    found_BK: Int[Array, "B K"]
    weights_BKV: Float[Array, "B K V"] | None = None


class Proposer:
    """Pure functions over a proposer's weights, the engine's pages and a `Drafting`.

    None of them changes what the target computes: they write pages of their own, or
    those of the target beyond its last token, which its own pass writes again.
    `params` are the target's, with the proposer's own as `DRAFT`; `kv_cache` holds the
    target's groups, then the proposer's.
    """

    def can_draft(self, drafting: Drafting, rows: SlotState) -> Bool[Array, " B"]:
        """Which rows it knows enough of."""
        del drafting
        return jnp.ones_like(rows.active_B)

    def draft(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: DraftStep
    ) -> tuple[KVCache, Drafts]:
        """Drafts for the rows of a decode bucket."""
        raise NotImplementedError

    def after_fill(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: FillStep
    ) -> tuple[KVCache, Drafting]:
        """Takes in a prefill call's chunks."""
        del params, step
        return kv_cache, drafting

    def after_decode(
        self, drafting: Drafting, rows: SlotState, output: ModelOutput
    ) -> Drafting:
        """Takes in what the target gave [B, Q, D] for the rows of a decode bucket."""
        del rows, output
        return drafting


def propose(
    params: Params,
    kv_cache: KVCache,
    drafting: Drafting,
    slots: SlotState,
    packed: Int[Array, " W"],
    extras: Extras,
    *,
    proposer: Proposer,
    layout: PackedLayout,
    bucket: int,
) -> tuple[KVCache, Drafting]:
    """Drafts for the rows that decode in this step.

    Args:
      params: see `Proposer`.
      kv_cache: donated.
      drafting: donated; with the tokens of all steps before.
      slots: state before this step's changes.
      packed: this step's changes.
      extras: counts and biases of the rows.
      proposer: who drafts.
      layout: where the fields of `packed` lie.
      bucket: rows of the decode call.
    """
    rows, decodes_B = decoding_rows(slots, packed, layout, bucket)
    can_B = decodes_B & proposer.can_draft(drafting, rows)
    most_B = most_drafts(drafting, rows, can_B)
    step = DraftStep(
        rows=rows,
        most_B=most_B,
        extras=extras,
        layout=layout,
        wants_weights=drafting.weights_BKV is not None,
    )
    kv_cache, drafts = proposer.draft(params, kv_cache, drafting, step)
    return kv_cache, with_drafts(drafting, drafts.found_BK, most_B, drafts.weights_BKV)
