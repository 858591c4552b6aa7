"""Proposers that are models: another one, or the target itself, smaller.

A model of its own keeps its keys and values in the pages of the target's tokens, in KV
groups behind the target's, so that whatever happens to a page happens to both. The
target itself, rounded or cut to its first layers, reads the target's own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.draft_sampling import draw_draft
from headrace.engine.drafting import DRAFT, Drafting, most_drafts, with_drafts
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras
from headrace.engine.slots import SlotState, decoding_rows
from headrace.engine.step_inputs import prompt_inputs, slot_inputs
from headrace.layers.inputs import KVCache, ModelOutput, Params
from headrace.layers.linear import rows_up_to
from headrace.pallas_kernels.gpu_target import gpu_capability


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """See `Proposer`.

    Attributes:
      model: the Linen module; its groups are counted from its own first.
      num_target_groups: KV groups of the target.
      has_pages: it has groups of its own, behind those.
    """

    model: Any
    num_target_groups: int
    has_pages: bool

    def propose(
        self,
        params: Params,
        kv_cache: KVCache,
        drafting: Drafting,
        slots: SlotState,
        packed: Int[Array, " W"],
        extras: Extras,
        *,
        layout: PackedLayout,
        bucket: int,
    ) -> tuple[KVCache, Drafting]:
        """As `Proposer.propose`."""
        rows, decodes_B = decoding_rows(slots, packed, layout, bucket)
        can_B = decodes_B & (rows.max_drafts_B > 0)
        if self.has_pages:
            can_B &= drafting.is_ready_B[rows.extra_row_B]
        most_B = most_drafts(drafting, rows, can_B)
        # With pages of its own the token before comes again: where all drafts were
        # right, the last of them is not in the pages.
        first_B = rows.position_B - int(self.has_pages)
        order_T = jnp.arange(1 + int(self.has_pages), dtype=jnp.int32)
        places_BT = jnp.maximum(first_B[:, None] + order_T, 0)
        history_BL = drafting.history_BL[rows.extra_row_B]
        tokens_BT = jnp.take_along_axis(history_BL, places_BT, axis=1)
        step = functools.partial(
            self._draft_one,
            params[DRAFT],
            rows=rows,
            extras=extras,
            layout=layout,
            wants_weights=drafting.weights_BKV is not None,
        )
        kv_cache, first = step(kv_cache, tokens_BT, first_B, can_B)

        def next_draft(carry: Any, index: Array) -> tuple[Any, Any]:
            kv_cache, token_B = carry
            kv_cache, drawn = step(
                kv_cache, token_B[:, None], rows.position_B + index, index < most_B
            )
            return (kv_cache, drawn[0]), drawn

        (kv_cache, _), later = jax.lax.scan(
            next_draft,
            (kv_cache, first[0]),
            jnp.arange(1, layout.num_drafts, dtype=jnp.int32),
            unroll=gpu_capability() is not None,
        )
        found_BK, weights_BKV = jax.tree.map(
            lambda a, b: jnp.swapaxes(jnp.concatenate([a[None], b]), 0, 1), first, later
        )
        return kv_cache, with_drafts(drafting, found_BK, most_B, weights_BKV)

    def _draft_one(
        self,
        params: Params,
        kv_cache: KVCache,
        tokens_BT: Int[Array, "B T"],
        first_B: Int[Array, " B"],
        can_B: Bool[Array, " B"],
        *,
        rows: SlotState,
        extras: Extras,
        layout: PackedLayout,
        wants_weights: bool,
    ) -> tuple[KVCache, tuple[Int[Array, " B"], Float[Array, "B V"] | None]]:
        """The draft behind some tokens, the first of which stands at `first_B`."""
        T = tokens_BT.shape[1]
        mine = kv_cache[self._first_group :]
        length_B = jnp.where(can_B, T, 0)
        inputs = slot_inputs(rows, tokens_BT, first_B, length_B, len(mine))
        with rows_up_to(layout.num_slots * T):
            output, mine = self.model.apply({"params": params}, mine, inputs)
            z_BTV = self.model.apply(
                {"params": params},
                output.hidden_BTD[:, -1:],
                can_B.astype(jnp.int32),
                method="logits",
            )
        kv_cache = (*kv_cache[: self._first_group], *mine)
        drawn = draw_draft(
            z_BTV[:, 0], rows, extras, first_B + T - 1, wants_weights=wants_weights
        )
        return kv_cache, drawn

    @property
    def _first_group(self) -> int:
        return self.num_target_groups if self.has_pages else 0

    def after_fill(
        self,
        params: Params,
        kv_cache: KVCache,
        drafting: Drafting,
        slots: SlotState,
        packed: Int[Array, " W"],
        output: ModelOutput,
        *,
        layout: PackedLayout,
        shape: tuple[int, int],
    ) -> tuple[KVCache, Drafting]:
        """As `Proposer.after_fill`."""
        del slots, output
        if not self.has_pages:
            return kv_cache, drafting
        mine = kv_cache[self._first_group :]
        inputs = prompt_inputs(packed, layout, shape, len(mine))
        with rows_up_to(layout.max_tokens):
            _, mine = self.model.apply({"params": params[DRAFT]}, mine, inputs)
        return (*kv_cache[: self._first_group], *mine), drafting

    def after_decode(
        self, drafting: Drafting, rows: SlotState, output: ModelOutput
    ) -> Drafting:
        """As `Proposer.after_decode`."""
        del rows, output
        return drafting
