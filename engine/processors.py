"""What a request's parameters do to its logits before temperature and filters.

Counts and biases per vocabulary id live beside the slot state, since few requests use
them: only the "full" sample variant reads them, and only a request that needs its row
has it written, at its start. A row keeps its place when its slot moves.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headrace.engine.request import MAX_BAD_WORD_LEN, Request
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
      bad_BNL: token sequences that the output must not have, flush right, -1 where
        unused.
      recent_BL: the last L - 1 output tokens, flush right, -1 where there were fewer.
    """

    count_BV: Int[Array, "B V"]
    bias_BV: Float[Array, "B V"]
    bad_BNL: Int[Array, "B N L"]
    recent_BL: Int[Array, "B L-1"]


class ExtrasRow(NamedTuple):
    """One row of `Extras`, on the host, in the order of `set_extras`."""

    count_V: np.ndarray
    bias_V: np.ndarray
    bad_NL: np.ndarray
    recent_L: np.ndarray


def empty_extras(num_slots: int, vocab_size: int, max_bad_words: int) -> Extras:
    """Rows that change nothing."""
    B, V, N, L = num_slots, vocab_size, max_bad_words, MAX_BAD_WORD_LEN
    return Extras(
        count_BV=jnp.zeros((B, V), jnp.int32),
        bias_BV=jnp.zeros((B, V), jnp.float32),
        bad_BNL=jnp.full((B, N, L), -1, jnp.int32),
        recent_BL=jnp.full((B, L - 1), -1, jnp.int32),
    )


def set_extras(
    extras: Extras,
    row: Int[Array, ""],
    count_V: Int[Array, " V"],
    bias_V: Float[Array, " V"],
    bad_NL: Int[Array, "N L"],
    recent_L: Int[Array, " L-1"],
) -> Extras:
    """The extras (donated) with one row replaced."""
    return Extras(
        count_BV=extras.count_BV.at[row].set(count_V),
        bias_BV=extras.bias_BV.at[row].set(bias_V),
        bad_BNL=extras.bad_BNL.at[row].set(bad_NL),
        recent_BL=extras.recent_BL.at[row].set(recent_L),
    )


def extras_of(request: Request, vocab_size: int, max_bad_words: int) -> ExtrasRow:
    """A request's row, from its whole prompt and its output so far."""
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
    bad_NL = np.full((max_bad_words, MAX_BAD_WORD_LEN), -1, np.int32)
    longer = [ids for ids in request.bad_ids if len(ids) > 1]
    bias_V[[ids[0] for ids in request.bad_ids if len(ids) == 1]] = -np.inf
    for place, ids in enumerate(longer):
        bad_NL[place, -len(ids) :] = ids
    recent_L = np.full(MAX_BAD_WORD_LEN - 1, -1, np.int32)
    if last := request.output_token_ids[-len(recent_L) :]:
        recent_L[-len(last) :] = last
    return ExtrasRow(count_V=count_V, bias_V=bias_V, bad_NL=bad_NL, recent_L=recent_L)


def process(
    z_BV: Float[Array, "B V"],
    rows: SlotState,
    extras: Extras,
    mask_BW: Int[Array, "B W"],
) -> Float[Array, "B V"]:
    """Bias, what is forbidden, then penalties, in vLLM's order; other rows keep their
    bits.

    Args:
      z_BV: raw logits of the rows' next tokens.
      rows: the slots in question.
      extras: of all slots.
      mask_BW: a bit per id, set where a grammar allows it.

    Source: Keskar et al. 2019, section 4.1 (repetition penalty).
    """
    count_BV = extras.count_BV[rows.extra_row_B]
    y_BV = z_BV + extras.bias_BV[rows.extra_row_B]
    y_BV = _forbid_stops(y_BV, rows)
    y_BV = _forbid_bad_words(y_BV, rows, extras)
    y_BV = jax.lax.cond(
        jnp.any(mask_BW != -1), _apply_mask, lambda y, _: y, y_BV, mask_BW
    )
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


def _forbid_bad_words(
    y_BV: Float[Array, "B V"], rows: SlotState, extras: Extras
) -> Float[Array, "B V"]:
    """No id that would complete a forbidden sequence.

    Worked example, L = 4: [-1, 7, 8, 9] forbids 9 where the output ends in 7, 8.
    """
    bad_BNL = extras.bad_BNL[rows.extra_row_B]
    recent_BNL = extras.recent_BL[rows.extra_row_B][:, None, :]
    before_BNL, last_BN = bad_BNL[..., :-1], bad_BNL[..., -1]
    fits_BN = jnp.all((before_BNL == recent_BNL) | (before_BNL < 0), axis=-1)
    id_BN = jnp.where(fits_BN & (last_BN >= 0), last_BN, y_BV.shape[1])
    row_B1 = jnp.arange(y_BV.shape[0], dtype=jnp.int32)[:, None]
    return y_BV.at[row_B1, id_BN].set(-jnp.inf, mode="drop")


def _apply_mask(
    y_BV: Float[Array, "B V"], mask_BW: Int[Array, "B W"]
) -> Float[Array, "B V"]:
    """No id whose bit is not set."""
    B, V = y_BV.shape
    bits_BWI = (mask_BW[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits_BWI.reshape(B, -1)[:, :V] == 1, y_BV, -jnp.inf)


def count_tokens(
    extras: Extras, rows: SlotState, token_B: Int[Array, " B"], live_B: Array
) -> Extras:
    """The extras (donated) after live rows have sampled their tokens."""
    row_B, adds_B = rows.extra_row_B, live_B & rows.has_extras_B
    count_BV = extras.count_BV.at[row_B, token_B].add(adds_B.astype(jnp.int32))
    old_BL = extras.recent_BL[row_B]
    new_BL = jnp.concatenate([old_BL[:, 1:], token_B[:, None]], axis=1)
    recent_BL = extras.recent_BL.at[row_B].set(
        jnp.where(adds_B[:, None], new_BL, old_BL)
    )
    return dataclasses.replace(extras, count_BV=count_BV, recent_BL=recent_BL)
