"""Log-probabilities of the raw logits: of a chosen token, and of the likeliest ones.

Pure functions of one row each: no number here depends on how many rows there are. The
vocabulary is never sorted. Knows nothing of slots, temperature or filters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from headrace.engine.thresholds import BLOCK, in_blocks, ordered_bits, row_sum

# A part of a block, in the search by ranks.
_PART = 16
# Less than the key of any number.
_NONE = -(2**31)


class TokenScores(NamedTuple):
    """Natural log-probabilities and ranks; X are any leading axes.

    Attributes:
      logprob_X: of the chosen token.
      rank_X: of the chosen token, 1 = likeliest; ties share the best rank.
      top_ids_XJ: the likeliest tokens, descending, the lowest id first among equals.
      top_logprobs_XJ: their log-probabilities.
      log_total_X: what was subtracted from the logits.
    """

    logprob_X: Float[Array, "*X"]
    rank_X: Int[Array, "*X"]
    top_ids_XJ: Int[Array, "*X J"]
    top_logprobs_XJ: Float[Array, "*X J"]
    log_total_X: Float[Array, "*X"]


def log_total(z_BV: Float[Array, "B V"]) -> Float[Array, " B"]:
    """Log of the sum of the exponentials of each row.

    A row's bits do not depend on the number of rows.
    """
    top_B = z_BV.max(-1)
    # In whole blocks, so that no exponential falls into what a vector leaves over.
    weight_BNS = jnp.exp(in_blocks(z_BV) - top_B[:, None, None])
    return jnp.log(row_sum(weight_BNS.reshape(z_BV.shape[0], -1))[:, 0]) + top_B


def token_scores(
    z_BV: Float[Array, "B V"], token_B: Int[Array, " B"], num_top: int
) -> TokenScores:
    """Scores under the raw logits, before temperature and filters.

    Args:
      z_BV: float32 logits.
      token_B: the chosen tokens.
      num_top: J, how many of the likeliest; V where there are fewer.
    """
    log_total_B = log_total(z_BV)
    chosen_B1 = jnp.take_along_axis(z_BV, token_B[:, None], axis=-1)
    top_BJ, ids_BJ = top_tokens(z_BV, num_top)
    return TokenScores(
        logprob_X=chosen_B1[:, 0] - log_total_B,
        rank_X=(z_BV > chosen_B1).sum(-1, dtype=jnp.int32) + 1,
        top_ids_XJ=ids_BJ,
        top_logprobs_XJ=top_BJ - log_total_B[:, None],
        log_total_X=log_total_B,
    )


def top_tokens(
    z_BV: Float[Array, "B V"], num_top: int
) -> tuple[Float[Array, "B J"], Int[Array, "B J"]]:
    """The `num_top` largest of each row, or all where there are fewer.

    Exact, without a sort: XLA sorts the whole vocabulary for a `top_k` past 16 on a
    GPU, and on a CPU it took ten times as long.

    Returns:
      Values and ids, descending, the lowest id first among equals.
    """
    num_top = min(num_top, z_BV.shape[1])
    if num_top == 0:
        empty_BJ = jnp.zeros((z_BV.shape[0], 0), jnp.int32)
        return empty_BJ.astype(z_BV.dtype), empty_BJ
    ids_BJ = jax.lax.platform_dependent(
        z_BV,
        cpu=lambda z_BV: top_ids_by_turns(z_BV, num_top),
        default=lambda z_BV: top_ids_by_ranks(z_BV, num_top),
    )
    return jnp.take_along_axis(z_BV, ids_BJ, axis=1), ids_BJ


def top_ids_by_turns(z_BV: Float[Array, "B V"], num_top: int) -> Int[Array, "B J"]:
    """One after the other: the best block of each row, then the best id in it.

    What is left of a block is what comes after the last id found, so nothing has to be
    marked as taken: the logits are read once, and only their blocks' maxima change.
    """
    B = z_BV.shape[0]
    z_BNS = in_blocks(z_BV)
    block_1N = jnp.arange(z_BNS.shape[1], dtype=jnp.int32)[None, :]
    lane_1S = jnp.arange(BLOCK, dtype=jnp.int32)[None, :]

    def turn(j: Int[Array, ""], state: tuple) -> tuple:
        best_BN, last_B1, last_id_B1, ids_BJ = state
        block_B1 = _first_best(best_BN)
        z_BS = jnp.take_along_axis(z_BNS, block_B1[:, :, None], axis=1)[:, 0]
        key_BS, id_BS = ordered_bits(z_BS), block_B1 * BLOCK + lane_1S
        is_left_BS = _comes_after(key_BS, id_BS, last_B1, last_id_B1)
        left_BS = jnp.where(is_left_BS, key_BS, _NONE)
        lane_B1 = _first_best(left_BS)
        key_B1 = left_BS.max(1, keepdims=True)
        id_B1 = block_B1 * BLOCK + lane_B1
        is_left_BS &= _comes_after(key_BS, id_BS, key_B1, id_B1)
        renewed_B1 = jnp.where(is_left_BS, key_BS, _NONE).max(1, keepdims=True)
        best_BN = jnp.where(block_1N == block_B1, renewed_B1, best_BN)
        ids_BJ = jax.lax.dynamic_update_slice(ids_BJ, id_B1, (0, j))
        return best_BN, key_B1, id_B1, ids_BJ

    state = (
        ordered_bits(z_BNS.max(-1)),
        jnp.full((B, 1), 2**31 - 1, jnp.int32),
        jnp.full((B, 1), -1, jnp.int32),
        jnp.zeros((B, num_top), jnp.int32),
    )
    return jax.lax.fori_loop(0, num_top, turn, state)[3]


def top_ids_by_ranks(z_BV: Float[Array, "B V"], num_top: int) -> Int[Array, "B J"]:
    """All at once: ranks the blocks by their maxima, then what the best ones hold.

    The J largest lie in the J blocks that come first by (maximum, place). A rank is a
    count of all that comes before: many comparisons, but few and static launches.
    """
    B = z_BV.shape[0]
    best_BN = ordered_bits(in_blocks(z_BV).max(-1))
    start_1N = jnp.arange(best_BN.shape[1], dtype=jnp.int32)[None, :] * BLOCK
    start_BJ = _first_by_rank(
        best_BN, jnp.broadcast_to(start_1N, best_BN.shape), num_top
    )
    for size, part in ((BLOCK, _PART), (_PART, 1)):
        inside_S = jnp.arange(size, dtype=jnp.int32)
        id_BC = (start_BJ[:, :, None] + inside_S).reshape(B, -1)
        key_BC = ordered_bits(
            jnp.take_along_axis(z_BV, id_BC, axis=1, mode="fill", fill_value=-jnp.inf)
        )
        best_BN = key_BC.reshape(B, -1, part).max(-1)
        start_BJ = _first_by_rank(best_BN, id_BC[:, ::part], num_top)
    return start_BJ


def _first_by_rank(
    key_BN: Int[Array, "B N"], id_BN: Int[Array, "B N"], count: int
) -> Int[Array, "B J"]:
    """Ids of the `count` first by (largest key, lowest id), or of all, in order."""
    count = min(count, key_BN.shape[1])
    comes_before_BNN = _comes_after(
        key_BN[:, :, None], id_BN[:, :, None], key_BN[:, None, :], id_BN[:, None, :]
    )
    rank_BN = comes_before_BNN.sum(-1, dtype=jnp.int32)
    is_at_BJN = rank_BN[:, None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(is_at_BJN, id_BN[:, None, :], 0).sum(-1, dtype=jnp.int32)


def _comes_after(
    key_X: Int[Array, "*X"],
    id_X: Int[Array, "*X"],
    other_X: Int[Array, "*X"],
    other_id_X: Int[Array, "*X"],
) -> Bool[Array, "*X"]:
    """The order of the likeliest: largest key first, lowest id among equals."""
    return (key_X < other_X) | ((key_X == other_X) & (id_X > other_id_X))


def _first_best(key_BN: Int[Array, "B N"]) -> Int[Array, "B 1"]:
    """Place of each row's maximum, the first one; `argmax` is slow on a CPU."""
    N = key_BN.shape[1]
    is_best_BN = key_BN == key_BN.max(1, keepdims=True)
    place_1N = jnp.arange(N, dtype=jnp.int32)[None, :]
    return jnp.where(is_best_BN, place_1N, N).min(1, keepdims=True)
