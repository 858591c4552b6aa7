"""What the model sees of a step: its ModelInputs, from the packed array."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.engine.packed_layout import PackedLayout
from headrace.engine.slots import SlotState
from headrace.layers.inputs import ModelInputs


def prompt_inputs(
    packed: Int[Array, " W"],
    layout: PackedLayout,
    shape: tuple[int, int],
    num_groups: int,
) -> ModelInputs:
    """A prefill call's chunks.

    Args:
      packed: this step's changes.
      layout: where the fields of `packed` lie.
      shape: (rows, tokens) of the call.
      num_groups: KV groups of the cache.
    """
    R, T = shape
    rows = layout.rows(packed)[:R]
    start_R, length_R = layout.field(rows, "start"), layout.field(rows, "length")
    return ModelInputs(
        tokens_BT=layout.tokens(packed, R, T),
        positions_BT=start_R[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :],
        query_len_B=length_R,
        context_len_B=jnp.where(length_R > 0, start_R + length_R, 0),
        page_tables=(layout.page_table(rows),) * num_groups,
    )


def ending_prompts(
    hidden_RTD: Float[Array, "R T D"], packed: Int[Array, " W"], layout: PackedLayout
) -> tuple[Float[Array, "R D"], Int[Array, " W"], Int[Array, " W"]]:
    """The last hidden state of each chunk, and who wants those that end a prompt.

    Args:
      hidden_RTD: of a prefill call.
      packed: the step's changes.
      layout: where the fields of `packed` lie.

    Returns:
      The states [R, D]; for each row of `packed` which of them it takes, a fork its
      leader's; and for which slot, one beyond the last where nothing ends.
    """
    R, rows = hidden_RTD.shape[0], layout.rows(packed)
    last_R = jnp.maximum(layout.field(rows[:R], "length") - 1, 0)
    source_W, index_W = layout.field(rows, "source"), jnp.arange(rows.shape[0])
    is_mine_W = (layout.field(rows, "is_last") == 1) | (source_W > 0)
    taken_W = jnp.where(source_W > 0, source_W - 1, jnp.minimum(index_W, R - 1))
    slot_W = jnp.where(is_mine_W, layout.field(rows, "slot"), layout.num_slots)
    return hidden_RTD[jnp.arange(R), last_R], taken_W, slot_W


def slot_inputs(
    rows: SlotState,
    tokens_BT: Int[Array, "B T"],
    first_B: Int[Array, " B"],
    length_B: Int[Array, " B"],
    num_groups: int,
) -> ModelInputs:
    """Tokens of slots that decode.

    Args:
      rows: the slots.
      tokens_BT: in order of position.
      first_B: position of each row's first.
      length_B: how many of a row's tokens count; 0 leaves the row out.
      num_groups: KV groups of the cache.
    """
    order_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    is_valid_BT = order_T < length_B[:, None]
    return ModelInputs(
        tokens_BT=jnp.where(is_valid_BT, tokens_BT, 0),
        positions_BT=jnp.where(is_valid_BT, first_B[:, None] + order_T, 0),
        query_len_B=length_B,
        context_len_B=jnp.where(length_B > 0, first_B + length_B, 0),
        page_tables=(rows.page_table_BM,) * num_groups,
    )
