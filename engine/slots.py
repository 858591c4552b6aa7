"""The slot state: one row per request in decode, kept on the device and donated.

The device itself decides EOS, stop ids and length, so the host uploads only what
changes. `apply_packed` is pure; `forward` and `sample` both call it, `sample` alone
returns what it gives.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from headrace.engine.packed_layout import PackedLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """Rows of the decode batch.

    Attributes:
      last_token_B: token sampled last, not yet in the KV pages.
      position_B: its position.
      active_B: the slot holds a request that decodes.
      remaining_B: tokens that it may still sample.
      stop_ids_BS: ids that end it, -1 where unused.
      seed_B2: low and high word of the request's seed.
      temperature_B, top_k_B, top_p_B: sampling parameters; temperature 0 is greedy,
        top_k 0 and top_p 1 are off.
      min_p_B: likewise, 0 is off.
      has_extras_B: the row's logits are processed, with what follows.
      min_position_B: first position that may hold a stop id.
      presence_B, frequency_B, repetition_B: penalties; 0, 0 and 1 are off.
      extra_row_B: the slot's row of `Extras`; moves with the slot.
      max_drafts_B: drafts that the row may take in a step.
      page_table_BM: page ids in order of position, 0 where unused.
    """

    last_token_B: Int[Array, " B"]
    position_B: Int[Array, " B"]
    active_B: Bool[Array, " B"]
    remaining_B: Int[Array, " B"]
    stop_ids_BS: Int[Array, "B S"]
    seed_B2: UInt[Array, "B 2"]
    temperature_B: Float[Array, " B"]
    top_k_B: Int[Array, " B"]
    top_p_B: Float[Array, " B"]
    min_p_B: Float[Array, " B"]
    has_extras_B: Bool[Array, " B"]
    min_position_B: Int[Array, " B"]
    presence_B: Float[Array, " B"]
    frequency_B: Float[Array, " B"]
    repetition_B: Float[Array, " B"]
    extra_row_B: Int[Array, " B"]
    max_drafts_B: Int[Array, " B"]
    page_table_BM: Int[Array, "B M"]


def empty_slots(layout: PackedLayout) -> SlotState:
    """A state without requests."""
    B, S, M = layout.num_slots, layout.max_stop_ids, layout.pages_per_request
    return SlotState(
        last_token_B=jnp.zeros(B, jnp.int32),
        position_B=jnp.zeros(B, jnp.int32),
        active_B=jnp.zeros(B, bool),
        remaining_B=jnp.zeros(B, jnp.int32),
        stop_ids_BS=jnp.full((B, S), -1, jnp.int32),
        seed_B2=jnp.zeros((B, 2), jnp.uint32),
        temperature_B=jnp.zeros(B, jnp.float32),
        top_k_B=jnp.zeros(B, jnp.int32),
        top_p_B=jnp.ones(B, jnp.float32),
        min_p_B=jnp.zeros(B, jnp.float32),
        has_extras_B=jnp.zeros(B, bool),
        min_position_B=jnp.zeros(B, jnp.int32),
        presence_B=jnp.zeros(B, jnp.float32),
        frequency_B=jnp.zeros(B, jnp.float32),
        repetition_B=jnp.ones(B, jnp.float32),
        extra_row_B=jnp.arange(B, dtype=jnp.int32),
        max_drafts_B=jnp.zeros(B, jnp.int32),
        page_table_BM=jnp.zeros((B, M), jnp.int32),
    )


def apply_packed(
    slots: SlotState, packed: Int[Array, " W"], layout: PackedLayout
) -> tuple[SlotState, Bool[Array, " B"]]:
    """Applies a step's changes: moves rows, ends released ones, lets page tables grow,
    fills fresh and resumed rows.

    A request's row becomes active with the last chunk of its prompt, its own or that
    of its leader; its position is then that of the last prompt token, so that sampling
    advances it like any other. A resumed row is as it was before it was preempted, with
    new pages.

    Returns:
      The new state, and which rows are fresh: they sample in this step from the
      logits of a prefill and do not decode.
    """
    source_B = layout.source(packed)
    slots = jax.tree.map(lambda leaf: leaf[source_B], slots)
    active_B = slots.active_B & (layout.released(packed) == 0)
    rows, B = layout.rows(packed), layout.num_slots

    def field(name: str) -> Int[Array, " R"]:
        return layout.field(rows, name)

    def bits(name: str, dtype: Any) -> Array:
        return jax.lax.bitcast_convert_type(field(name), dtype)

    resumes_R, forks_R = field("resumes") == 1, field("source") > 0
    is_fresh_R = (field("is_last") == 1) | forks_R
    # Rows that are not the last chunk of a prompt are dropped by an index past B.
    slot_R = jnp.where(is_fresh_R | resumes_R, field("slot"), B)

    def put(leaf: Array, rows_R: Array, slot_R: Array = slot_R) -> Array:
        return leaf.at[slot_R].set(rows_R.astype(leaf.dtype), mode="drop")

    resumed_R = jnp.where(resumes_R, field("slot"), B)
    position_R = jnp.where(
        resumes_R | forks_R, field("position"), field("start") + field("length") - 1
    )
    seeds = [bits("seed_low", jnp.uint32), bits("seed_high", jnp.uint32)]
    table_BM = _grown(slots.page_table_BM, layout.new_pages(packed))
    changed = SlotState(
        last_token_B=put(slots.last_token_B, field("last_token"), resumed_R),
        position_B=put(slots.position_B, position_R),
        active_B=put(active_B, jnp.ones_like(slot_R)),
        remaining_B=put(slots.remaining_B, field("remaining")),
        stop_ids_BS=put(slots.stop_ids_BS, layout.stop_ids(rows)),
        seed_B2=put(slots.seed_B2, jnp.stack(seeds, axis=1)),
        temperature_B=put(slots.temperature_B, bits("temperature", jnp.float32)),
        top_k_B=put(slots.top_k_B, field("top_k")),
        top_p_B=put(slots.top_p_B, bits("top_p", jnp.float32)),
        min_p_B=put(slots.min_p_B, bits("min_p", jnp.float32)),
        has_extras_B=put(slots.has_extras_B, field("has_extras")),
        min_position_B=put(slots.min_position_B, field("min_position")),
        presence_B=put(slots.presence_B, bits("presence", jnp.float32)),
        frequency_B=put(slots.frequency_B, bits("frequency", jnp.float32)),
        repetition_B=put(slots.repetition_B, bits("repetition", jnp.float32)),
        extra_row_B=slots.extra_row_B,
        max_drafts_B=put(slots.max_drafts_B, field("max_drafts")),
        page_table_BM=put(table_BM, layout.page_table(rows)),
    )
    fresh_R = jnp.where(is_fresh_R, field("slot"), B)
    fresh_B = put(jnp.zeros(B, bool), jnp.ones_like(slot_R), fresh_R)
    return changed, fresh_B


def decoding_rows(
    slots: SlotState, packed: Int[Array, " W"], layout: PackedLayout, bucket: int
) -> tuple[SlotState, Bool[Array, " bucket"]]:
    """The first rows after a step's changes, and which of them decode in it."""
    slots, fresh_B = apply_packed(slots, packed, layout)
    rows = jax.tree.map(lambda leaf: leaf[:bucket], slots)
    return rows, rows.active_B & ~fresh_B[:bucket]


def _grown(
    table_BM: Int[Array, "B M"], new_page_B: Int[Array, " B"]
) -> Int[Array, "B M"]:
    """Page tables with one page more, where there is one.

    Behind the last: the host may open a page that only accepted drafts would reach.
    """
    B, M = table_BM.shape
    index_B = jnp.minimum(jnp.sum(table_BM > 0, axis=1), M - 1)
    row_B = jnp.where(new_page_B > 0, jnp.arange(B, dtype=jnp.int32), B)
    return table_BM.at[row_B, index_B].set(new_page_B, mode="drop")
