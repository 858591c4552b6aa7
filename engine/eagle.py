"""EAGLE's heads as proposers: a chain of drafts over the target's hidden states."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.draft_sampling import draw_draft
from headrace.engine.drafting import DRAFT, Drafting, most_drafts, with_drafts
from headrace.engine.hidden_states import keep_all, keep_last
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras
from headrace.engine.slots import SlotState, decoding_rows
from headrace.engine.step_inputs import prompt_inputs, slot_inputs
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelInputs, ModelOutput, Params
from headrace.layers.linear import rows_up_to
from headrace.pallas_kernels.gpu_target import gpu_capability


@dataclasses.dataclass(frozen=True)
class EagleChain:
    """An EAGLE head that drafts a chain, each draft from the one before.

    Attributes:
      head: `layers.models.eagle.Eagle`.
      target: the Linen module of the target, whose embedding and head it shares.
      num_target_groups: KV groups of the target.
    """

    head: Any
    target: Any
    num_target_groups: int

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
        row_B = rows.extra_row_B
        num_new_B = drafting.num_new_B[row_B]
        can_B = decodes_B & (num_new_B > 0) & (rows.max_drafts_B > 0)
        can_B &= drafting.is_ready_B[row_B]
        most_B = most_drafts(drafting, rows, can_B)
        assert drafting.hidden_BQD is not None
        # Pairs of the target's own hidden states replace those that were guessed.
        hidden_BQD = self._fuse(params, drafting.hidden_BQD[row_B])
        first_B = rows.position_B - num_new_B
        order_Q = jnp.arange(hidden_BQD.shape[1], dtype=jnp.int32)
        places_BQ = jnp.clip(first_B[:, None] + 1 + order_Q, 0)
        tokens_BQ = jnp.take_along_axis(drafting.history_BL[row_B], places_BQ, axis=1)
        step = functools.partial(
            self._draft_one,
            params,
            rows=rows,
            extras=extras,
            layout=layout,
            wants_weights=drafting.weights_BKV is not None,
        )
        length_B = jnp.where(can_B, num_new_B, 0)
        kv_cache, hidden_BD, first = step(
            kv_cache, hidden_BQD, tokens_BQ, first_B, length_B
        )

        def next_draft(carry: Any, index: Array) -> tuple[Any, Any]:
            kv_cache, hidden_BD, token_B = carry
            length_B = (index < most_B).astype(jnp.int32)
            kv_cache, hidden_BD, drawn = step(
                kv_cache, hidden_BD[:, None], token_B[:, None],
                rows.position_B + index - 1, length_B,
            )  # fmt: skip
            return (kv_cache, hidden_BD, drawn[0]), drawn

        begun: Any = (kv_cache, hidden_BD, first[0])
        (kv_cache, *_), later = jax.lax.scan(
            next_draft,
            begun,
            jnp.arange(1, layout.num_drafts, dtype=jnp.int32),
            unroll=gpu_capability() is not None,
        )
        found_BK, weights_BKV = jax.tree.map(
            lambda a, b: jnp.swapaxes(jnp.concatenate([a[None], b]), 0, 1), first, later
        )
        return kv_cache, with_drafts(drafting, found_BK, most_B, weights_BKV)

    def _fuse(
        self, params: Params, hidden_BTA: Float[Array, "B T A"]
    ) -> Float[Array, "B T D"]:
        return self.head.apply({"params": params[DRAFT]}, hidden_BTA, method="fuse")

    def _run(
        self,
        params: Params,
        kv_cache: KVCache,
        inputs: ModelInputs,
        hidden_BTD: Float[Array, "B T D"],
    ) -> tuple[KVCache, Float[Array, "B T D"]]:
        """The head over pairs of hidden states and tokens."""
        token_BTD = linear.embed(
            params["embedding"], inputs.tokens_BT, hidden_BTD.dtype
        )
        guessed_BTD, mine = self.head.apply(
            {"params": params[DRAFT]},
            kv_cache[self.num_target_groups :],
            inputs,
            hidden_BTD,
            token_BTD,
        )
        return (*kv_cache[: self.num_target_groups], *mine), guessed_BTD

    def _draft_one(
        self,
        params: Params,
        kv_cache: KVCache,
        hidden_BTD: Float[Array, "B T D"],
        tokens_BT: Int[Array, "B T"],
        first_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
        *,
        rows: SlotState,
        extras: Extras,
        layout: PackedLayout,
        wants_weights: bool,
    ) -> tuple[KVCache, Float[Array, "B D"], tuple[Array, Array | None]]:
        """The draft behind some pairs, the first hidden state being of `first_B`."""
        inputs = slot_inputs(rows, tokens_BT, first_B, length_B, 1)
        with rows_up_to(layout.num_slots * tokens_BT.shape[1]):
            kv_cache, guessed_BTD = self._run(params, kv_cache, inputs, hidden_BTD)
            last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
            last_B1D = jnp.take_along_axis(guessed_BTD, last_B11, axis=1)
            z_BV = self._logits(params, last_B1D, length_B > 0)
        place_B = first_B + jnp.maximum(length_B, 1)
        drawn = draw_draft(z_BV, rows, extras, place_B, wants_weights=wants_weights)
        return kv_cache, last_B1D[:, 0], drawn

    def _logits(
        self,
        params: Params,
        hidden_B1D: Float[Array, "B 1 D"],
        can_B: Bool[Array, " B"],
    ) -> Float[Array, "B V"]:
        """Scores over the target's vocabulary."""
        counts_B = can_B.astype(jnp.int32)
        if not self.head.num_fused:
            return self.target.apply(
                {"params": params}, hidden_B1D, counts_B, method="logits"
            )[:, 0]
        z_BW = self.head.apply(
            {"params": params[DRAFT]}, hidden_B1D, counts_B, method="logits"
        )[:, 0]
        shape = (z_BW.shape[0], params["embedding"].shape[0])
        least_BV = jnp.full(shape, -jnp.inf, z_BW.dtype)
        return least_BV.at[:, params[DRAFT]["token_ids"]].set(z_BW)

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
        hidden_RTA = self._read(output)
        inputs = prompt_inputs(packed, layout, shape, 1)
        rows = layout.rows(packed)[: shape[0]]
        next_R = layout.field(rows, "next_token")
        # Each hidden state meets the token behind it; that of a prompt's last is not
        # known yet, and its pair comes with the first step.
        length_R = inputs.query_len_B
        last_R = jnp.maximum(length_R - 1, 0)
        tokens_RT = jnp.roll(inputs.tokens_BT, -1, axis=1)
        tokens_RT = tokens_RT.at[jnp.arange(shape[0]), last_R].set(next_R)
        known_R = jnp.maximum(length_R - (next_R < 0), 0)
        inputs = dataclasses.replace(
            inputs,
            tokens_BT=jnp.maximum(tokens_RT, 0),
            query_len_B=known_R,
            context_len_B=jnp.where(
                known_R > 0, inputs.positions_BT[:, 0] + known_R, 0
            ),
        )
        with rows_up_to(layout.max_tokens):
            fused_RTD = self._fuse(params, hidden_RTA)
            kv_cache, _ = self._run(params, kv_cache, inputs, fused_RTD)
        return kv_cache, keep_last(drafting, slots, packed, layout, hidden_RTA)

    def after_decode(
        self, drafting: Drafting, rows: SlotState, output: ModelOutput
    ) -> Drafting:
        """As `Proposer.after_decode`."""
        return keep_all(drafting, rows, self._read(output))

    def _read(self, output: ModelOutput) -> Float[Array, "B T A"]:
        if not self.head.num_fused:
            return output.hidden_BTD
        return jnp.concatenate(output.aux_hidden, axis=-1)
