"""EAGLE's heads as proposers: a chain of drafts over the target's hidden states."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.draft_sampling import Drawn, draw_chain, draw_draft
from headrace.engine.drafting import Drafting
from headrace.engine.hidden_states import keep_all, keep_last
from headrace.engine.proposer import DRAFT, Drafts, DraftStep, FillStep, Proposer
from headrace.engine.slots import SlotState
from headrace.engine.step_inputs import slot_inputs
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelInputs, ModelOutput, Params
from headrace.layers.linear import rows_up_to

# The cache, and hidden states to go on from, [B, T, D].
_State = tuple[KVCache, Array]


@dataclasses.dataclass(frozen=True)
class EagleChain(Proposer):
    """An EAGLE head that drafts a chain, each draft from the one before.

    Attributes:
      head: `layers.models.eagle.Eagle`.
      target: the Linen module of the target, whose embedding and head it shares.
      num_target_groups: KV groups of the target.
    """

    head: Any
    target: Any
    num_target_groups: int

    def can_draft(self, drafting: Drafting, rows: SlotState) -> Bool[Array, " B"]:
        """As `Proposer.can_draft`."""
        row_B = rows.extra_row_B
        return drafting.is_ready_B[row_B] & (drafting.num_new_B[row_B] > 0)

    def draft(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: DraftStep
    ) -> tuple[KVCache, Drafts]:
        """As `Proposer.draft`."""
        rows, row_B = step.rows, step.rows.extra_row_B
        draw = functools.partial(self._draw, params, step)
        assert drafting.hidden_BQD is not None
        # Pairs of the target's own hidden states replace those that were guessed.
        num_new_B = drafting.num_new_B[row_B]
        hidden_BQD = self._fuse(params, drafting.hidden_BQD[row_B])
        first_B = rows.position_B - num_new_B
        order_Q = jnp.arange(hidden_BQD.shape[1], dtype=jnp.int32)
        places_BQ = jnp.clip(first_B[:, None] + 1 + order_Q, 0)
        tokens_BQ = jnp.take_along_axis(drafting.history_BL[row_B], places_BQ, axis=1)
        length_B = jnp.where(step.most_B > 0, num_new_B, 0)
        first = draw((kv_cache, hidden_BQD), tokens_BQ, first_B, length_B)

        def next_draft(state: _State, token_B: Array, index: Array) -> Any:
            length_B = (index < step.most_B).astype(jnp.int32)
            place_B = rows.position_B + index - 1
            return draw(state, token_B[:, None], place_B, length_B)

        (kv_cache, _), drafts = draw_chain(first, next_draft, step.layout.num_drafts)
        return kv_cache, drafts

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

    def _draw(
        self,
        params: Params,
        step: DraftStep,
        state: _State,
        tokens_BT: Int[Array, "B T"],
        first_B: Int[Array, " B"],
        length_B: Int[Array, " B"],
    ) -> tuple[_State, Drawn]:
        """The draft behind some pairs, the first hidden state being of `first_B`.

        What is left is the cache, and the hidden state that was guessed last.
        """
        kv_cache, hidden_BTD = state
        inputs = slot_inputs(step.rows, tokens_BT, first_B, length_B, 1)
        with rows_up_to(step.layout.num_slots * tokens_BT.shape[1]):
            kv_cache, guessed_BTD = self._run(params, kv_cache, inputs, hidden_BTD)
            last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
            last_B1D = jnp.take_along_axis(guessed_BTD, last_B11, axis=1)
            z_BV = self._logits(params, last_B1D, length_B > 0)
        place_B = first_B + jnp.maximum(length_B, 1)
        drawn = draw_draft(
            z_BV, step.rows, step.extras, place_B, wants_weights=step.wants_weights
        )
        return (kv_cache, last_B1D), drawn

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
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: FillStep
    ) -> tuple[KVCache, Drafting]:
        """As `Proposer.after_fill`."""
        hidden_RTA, layout, inputs = self._read(step.output), step.layout, step.inputs
        R = hidden_RTA.shape[0]
        next_R = layout.field(layout.rows(step.packed)[:R], "next_token")
        # Each hidden state meets the token behind it; that of a prompt's last is not
        # known yet, and its pair comes with the first step.
        length_R = inputs.query_len_B
        last_R = jnp.maximum(length_R - 1, 0)
        tokens_RT = jnp.roll(inputs.tokens_BT, -1, axis=1)
        tokens_RT = tokens_RT.at[jnp.arange(R), last_R].set(next_R)
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
        return kv_cache, keep_last(drafting, step, hidden_RTA)

    def after_decode(
        self, drafting: Drafting, rows: SlotState, output: ModelOutput
    ) -> Drafting:
        """As `Proposer.after_decode`."""
        return keep_all(drafting, rows, self._read(output))

    def _read(self, output: ModelOutput) -> Float[Array, "B T A"]:
        if not self.head.num_fused:
            return output.hidden_BTD
        return jnp.concatenate(output.aux_hidden, axis=-1)
