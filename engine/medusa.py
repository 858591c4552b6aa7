"""Medusa's heads: each guesses one further token from the same hidden state."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine.draft_sampling import draw_draft
from headrace.engine.drafting import DRAFT, Drafting, most_drafts, with_drafts
from headrace.engine.hidden_states import keep_all, keep_last
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import Extras
from headrace.engine.slots import SlotState, decoding_rows
from headrace.layers import linear
from headrace.layers.inputs import KVCache, ModelOutput, Params


@dataclasses.dataclass(frozen=True)
class Medusa:
    """See `Proposer`. Source: Cai et al. 2024, section 2.1.1."""

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
        assert drafting.hidden_BQD is not None
        last_B = jnp.maximum(num_new_B - 1, 0)
        hidden_BD = drafting.hidden_BQD[row_B, last_B]
        found, weights = [], []
        for index in range(layout.num_drafts):
            z_BV = _medusa_logits(params[DRAFT][f"head_{index}"], hidden_BD)
            token_B, weights_BV = draw_draft(
                z_BV, rows, extras, rows.position_B + index,
                wants_weights=drafting.weights_BKV is not None,
            )  # fmt: skip
            found.append(token_B)
            weights.append(weights_BV)
        found_BK, weights_BKV = jax.tree.map(
            lambda *parts: jnp.stack(parts, axis=1),
            *zip(found, weights, strict=True),
        )
        most_B = most_drafts(drafting, rows, can_B)
        return kv_cache, with_drafts(drafting, found_BK, most_B, weights_BKV)

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
        del params, shape
        return kv_cache, keep_last(drafting, slots, packed, layout, output.hidden_BTD)

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
