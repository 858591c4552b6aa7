"""Medusa's heads: each guesses one further token from the same hidden state."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from headrace.engine.draft_sampling import draw_draft
from headrace.engine.drafting import Drafting
from headrace.engine.hidden_states import keep_all, keep_last
from headrace.engine.proposer import DRAFT, Drafts, DraftStep, FillStep, Proposer
from headrace.engine.slots import SlotState
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelOutput, Params


@dataclasses.dataclass(frozen=True)
class Medusa(Proposer):
    """See `Proposer`. Source: Cai et al. 2024, section 2.1.1."""

    def can_draft(self, drafting: Drafting, rows: SlotState) -> Bool[Array, " B"]:
        """As `Proposer.can_draft`."""
        return drafting.num_new_B[rows.extra_row_B] > 0

    def draft(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: DraftStep
    ) -> tuple[KVCache, Drafts]:
        """As `Proposer.draft`."""
        rows, row_B = step.rows, step.rows.extra_row_B
        assert drafting.hidden_BQD is not None
        last_B = jnp.maximum(drafting.num_new_B[row_B] - 1, 0)
        hidden_BD = drafting.hidden_BQD[row_B, last_B]
        drawn = [
            draw_draft(
                _medusa_logits(params[DRAFT][f"head_{index}"], hidden_BD),
                rows,
                step.extras,
                rows.position_B + index,
                wants_weights=step.wants_weights,
            )
            for index in range(step.layout.num_drafts)
        ]
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *drawn)
        return kv_cache, Drafts(*stacked)

    def after_fill(
        self, params: Params, kv_cache: KVCache, drafting: Drafting, step: FillStep
    ) -> tuple[KVCache, Drafting]:
        """As `Proposer.after_fill`."""
        del params
        return kv_cache, keep_last(drafting, step, step.output.hidden_BTD)

    def after_decode(
        self, drafting: Drafting, rows: SlotState, output: ModelOutput
    ) -> Drafting:
        """As `Proposer.after_decode`."""
        return keep_all(drafting, rows, output.hidden_BTD)


def _medusa_logits(head: Params, hidden_BD: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Residual blocks, then an output head of its own."""
    blocks = sorted(name for name in head if name.startswith("block_"))
    for name in blocks:
        inner_BD = linear.matmul(head[name]["weight"], hidden_BD) + head[name]["bias"]
        hidden_BD = hidden_BD + jax.nn.silu(inner_BD)
    return linear.matmul(head["head"], hidden_BD, out_dtype=jnp.float32)
