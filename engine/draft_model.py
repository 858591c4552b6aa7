"""Proposers that are models: another one, or the target itself, smaller.

A model of its own keeps its keys and values in the pages of the target's tokens, in KV
groups behind the target's, so that whatever happens to a page happens to both. The
target itself, rounded or cut to its first layers, reads the target's own.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from headrace.engine.draft_sampling import Drawn, draw_chain, draw_draft
from headrace.engine.drafting import Drafting
from headrace.engine.proposer import DRAFT, Drafts, DraftStep, FillStep, Proposer
from headrace.engine.slots import SlotState
from headrace.engine.step_inputs import slot_inputs
from headrace.layers.inputs import KVCache, Params
from headrace.layers.linear import rows_up_to


@dataclasses.dataclass(frozen=True)
class DraftModel(Proposer):
    """See `Proposer`.

    Attributes:
      model: the Linen module; its groups are counted from its own first.
      num_target_groups: KV groups of the target.
      has_pages: it has groups of its own, behind those.
    """

    model: Any
    num_target_groups: int
    has_pages: bool

    def can_draft(self, drafting: Drafting, rows: SlotState) -> Bool[Array, " B"]:
        """As `Proposer.can_draft`."""
        if not self.has_pages:
            return super().can_draft(drafting, rows)
        return drafting.is_ready_B[rows.extra_row_B]

    def draft(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: DraftStep
    ) -> tuple[KVCache, Drafts]:
        """As `Proposer.draft`."""
        rows = step.rows
        draw = functools.partial(self._draw, params[DRAFT], step)
        # With pages of its own the token before comes again: where all drafts were
        # right, the last of them is not in the pages.
        first_B = rows.position_B - int(self.has_pages)
        order_T = jnp.arange(1 + int(self.has_pages), dtype=jnp.int32)
        places_BT = jnp.maximum(first_B[:, None] + order_T, 0)
        history_BL = drafting.history_BL[rows.extra_row_B]
        tokens_BT = jnp.take_along_axis(history_BL, places_BT, axis=1)
        first = draw(kv_cache, tokens_BT, first_B, step.most_B > 0)

        def next_draft(kv_cache: KVCache, token_B: Array, index: Array) -> Any:
            place_B = rows.position_B + index
            return draw(kv_cache, token_B[:, None], place_B, index < step.most_B)

        return draw_chain(first, next_draft, step.layout.num_drafts)

    def _draw(
        self,
        params: Params,
        step: DraftStep,
        kv_cache: KVCache,
        tokens_BT: Int[Array, "B T"],
        first_B: Int[Array, " B"],
        can_B: Bool[Array, " B"],
    ) -> tuple[KVCache, Drawn]:
        """The draft behind some tokens, the first of which stands at `first_B`."""
        T = tokens_BT.shape[1]
        target, mine = self._split(kv_cache)
        length_B = jnp.where(can_B, T, 0)
        inputs = slot_inputs(step.rows, tokens_BT, first_B, length_B, len(mine))
        with rows_up_to(step.layout.num_slots * T):
            output, mine = self.model.apply({"params": params}, mine, inputs)
            z_B1V = self.model.apply(
                {"params": params},
                output.hidden_BTD[:, -1:],
                can_B.astype(jnp.int32),
                method="logits",
            )
        drawn = draw_draft(
            z_B1V[:, 0],
            step.rows,
            step.extras,
            first_B + T - 1,
            wants_weights=step.wants_weights,
        )
        return (*target, *mine), drawn

    def after_fill(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: FillStep
    ) -> tuple[KVCache, Drafting]:
        """As `Proposer.after_fill`."""
        if not self.has_pages:
            return kv_cache, drafting
        target, mine = self._split(kv_cache)
        with rows_up_to(step.layout.max_tokens):
            _, mine = self.model.apply({"params": params[DRAFT]}, mine, step.inputs)
        return (*target, *mine), drafting

    def _split(self, kv_cache: KVCache) -> tuple[KVCache, KVCache]:
        """The groups that it leaves alone, and those that it reads and writes."""
        first = self.num_target_groups if self.has_pages else 0
        return kv_cache[:first], kv_cache[first:]
