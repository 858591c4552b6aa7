"""What a request's parameters do to its logits before temperature and filters.

Counts and biases per vocabulary id live beside the slot state, since few requests use
them: only the "full" sample variant reads them, and only a request that needs its row
has it written, at its start. A row keeps its place when its slot moves.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headrace.engine.request import Request
from headrace.engine.slots import SlotState

# A count holds the number of output tokens, and this bit where the prompt has the id.
_IN_PROMPT = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """Per row and vocabulary id; a slot's row is `SlotState.extra_row_B`.

    Attributes:
      count_BV: how often the request's output has the id, and whether its prompt has.
      bias_BV: added to the logits; -inf forbids the id.
    """

    count_BV: Int[Array, "B V"]
    bias_BV: Float[Array, "B V"]


def empty_extras(num_slots: int, vocab_size: int) -> Extras:
    """Rows that change nothing."""
    return Extras(
        count_BV=jnp.zeros((num_slots, vocab_size), jnp.int32),
        bias_BV=jnp.zeros((num_slots, vocab_size), jnp.float32),
    )


def set_extras(
    extras: Extras,
    row: Int[Array, ""],
    count_V: Int[Array, " V"],
    bias_V: Float[Array, " V"],
) -> Extras:
    """The extras (donated) with one row replaced."""
    return Extras(
        count_BV=extras.count_BV.at[row].set(count_V),
        bias_BV=extras.bias_BV.at[row].set(bias_V),
    )


def extras_of(request: Request, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A request's (count_V, bias_V), from its whole prompt and its output so far."""
    output = np.array(request.output_token_ids, np.int64)
    count_V = np.bincount(output, minlength=vocab_size).astype(np.int32)
    count_V[list(set(request.prompt_token_ids))] |= _IN_PROMPT
    params = request.params
    bias_V = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias_V[:] = -np.inf
        bias_V[list(params.allowed_token_ids)] = 0
    for token_id, bias in (params.logit_bias or {}).items():
        bias_V[token_id] += np.float32(bias)
    return count_V, bias_V


def process(
    z_BV: Float[Array, "B V"], rows: SlotState, extras: Extras
) -> Float[Array, "B V"]:
    """Bias, minimum length, then penalties, in vLLM's order; others keep their bits.

    Args:
      z_BV: raw logits of the rows' next tokens.
      rows: the slots in question.
      extras: of all slots.

    Source: Keskar et al. 2019, section 4.1 (repetition penalty).
    """
    count_BV = extras.count_BV[rows.extra_row_B]
    y_BV = z_BV + extras.bias_BV[rows.extra_row_B]
    y_BV = _forbid_stops(y_BV, rows)
    repetition_B1 = rows.repetition_B[:, None]
    punished_BV = jnp.where(y_BV > 0, y_BV / repetition_B1, y_BV * repetition_B1)
    y_BV = jnp.where(count_BV > 0, punished_BV, y_BV)
    times_BV = (count_BV & (_IN_PROMPT - 1)).astype(jnp.float32)
    y_BV = y_BV - rows.frequency_B[:, None] * times_BV
    y_BV = y_BV - rows.presence_B[:, None] * (times_BV > 0)
    return jnp.where(rows.has_extras_B[:, None], y_BV, z_BV)


def _forbid_stops(y_BV: Float[Array, "B V"], rows: SlotState) -> Float[Array, "B V"]:
    """No id that ends the request before it may end."""
    is_early_B = rows.position_B + 1 < rows.min_position_B
    V = y_BV.shape[1]
    id_BS = jnp.where(
        (rows.stop_ids_BS >= 0) & is_early_B[:, None], rows.stop_ids_BS, V
    )
    row_B1 = jnp.arange(y_BV.shape[0], dtype=jnp.int32)[:, None]
    return y_BV.at[row_B1, id_BS].set(-jnp.inf, mode="drop")


def count_tokens(
    extras: Extras, rows: SlotState, token_B: Int[Array, " B"], live_B: Array
) -> Extras:
    """The extras (donated) after live rows have sampled their tokens."""
    adds_B = (live_B & rows.has_extras_B).astype(jnp.int32)
    count_BV = extras.count_BV.at[rows.extra_row_B, token_B].add(adds_B)
    return dataclasses.replace(extras, count_BV=count_BV)
