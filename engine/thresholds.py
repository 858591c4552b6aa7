"""Finds, in rows of logits, the value from which on a top-k or top-p set is kept.

Nothing is sorted. In general a threshold's bit pattern is found digit by digit, in 16
passes over the row; on a CPU, where each pass is dear, the search for the k-th largest
stops as soon as every row is decided. Both are exact, so they keep the same tokens.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

# Terms that one pass of a sum adds up.
_SUM_WAYS = 8
_MINUS_INF_KEY = -0x7F800000
# How far under the largest number the search for a threshold looks first.
_FIRST_DROP = 16.0
# Passes after which halving the numbers gives way to halving their bit patterns.
_MAX_HALVINGS = 24
# Where k is smaller than the number of blocks, so many blocks of ids are searched.
_NUM_BLOCKS = 64
# Ids per block: a whole number of vectors on every processor.
BLOCK = 128


def row_sum(y_BV: Shaped[Array, "*X V"]) -> Shaped[Array, "*X 1"]:
    """The sum of each row as a fixed tree: slices of whole arrays, added up.

    What XLA makes of a sum adds in another order for fewer rows, on a CPU under 8 on
    one processor, up to 8 on another. Sums of whole arrays leave it no choice.
    """
    while (size := y_BV.shape[-1]) > 1:
        ways = min(_SUM_WAYS, size)
        part = -(-size // ways)
        no_padding = [(0, 0)] * (y_BV.ndim - 1)
        y_BV = jnp.pad(y_BV, (*no_padding, (0, ways * part - size)))
        total_BV = y_BV[..., :part]
        for way in range(1, ways):
            total_BV = total_BV + y_BV[..., way * part : (way + 1) * part]
        y_BV = total_BV
    return y_BV


def ordered_bits(x: Float[Array, "*X"]) -> Int[Array, "*X"]:
    """Maps float32 to int32 so that the order of numbers is the order of ints.

    Both zeros become 0; -2**31 stands for no number.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)


def _number(key: Int[Array, "*X"]) -> Float[Array, "*X"]:
    """The float32 that `ordered_bits` maps to a key."""
    bits = jnp.where(key < 0, jnp.int32(-(2**31)) - key, key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def keep_from_largest(
    holds: Callable[[Bool[Array, "B 3 V"]], Bool[Array, "B 3"]],
    z_BV: Float[Array, "B V"],
) -> Bool[Array, "B V"]:
    """Which keys are at least t, the largest t per row with holds(key >= t).

    Finds two bits a pass: a threshold's digit is how many of its three candidates hold.
    Static, so that a GPU need not ask the host whether to go on.

    Args:
      holds: true for the smallest t, and never true again once it is false.
      z_BV: numbers to be ordered.
    """
    sign = jnp.uint32(1 << 31)
    key_BV = jax.lax.bitcast_convert_type(ordered_bits(z_BV), jnp.uint32) ^ sign
    digit_3 = jnp.arange(1, 4, dtype=jnp.uint32)

    def add_digit(i: Int[Array, ""], t_B1: UInt[Array, "B 1"]) -> UInt[Array, "B 1"]:
        shift = (30 - 2 * i).astype(jnp.uint32)
        t_B3 = t_B1 + (digit_3 << shift)
        holds_B3 = holds(key_BV[:, None, :] >= t_B3[:, :, None])
        digit_B1 = holds_B3.sum(-1, keepdims=True, dtype=jnp.uint32)
        return t_B1 + (digit_B1 << shift)

    t_B1 = jnp.zeros((z_BV.shape[0], 1), jnp.uint32)
    return key_BV >= jax.lax.fori_loop(0, 16, add_digit, t_B1)


def top_k_by_digits(
    z_BV: Float[Array, "B V"], k_B1: Int[Array, "B 1"]
) -> Bool[Array, "B V"]:
    """As `keep_top_k`, for k > 0, in a fixed number of passes."""

    def holds(above_B3V: Bool[Array, "B 3 V"]) -> Bool[Array, "B 3"]:
        return above_B3V.sum(-1, dtype=jnp.int32) >= k_B1

    return keep_from_largest(holds, z_BV)


def top_k_by_halving(
    z_BV: Float[Array, "B V"], k_B1: Int[Array, "B 1"]
) -> Bool[Array, "B V"]:
    """As `keep_top_k`, for k > 0, until each row has its k or nothing is between.

    For small k the search sees the best blocks of each row only.
    """
    key_BV = ordered_bits(z_BV)
    if z_BV.shape[1] < 2 * _NUM_BLOCKS * BLOCK:
        return key_BV >= _halve(z_BV, k_B1)
    low_B1 = jax.lax.cond(
        jnp.all(k_B1 < _NUM_BLOCKS),
        lambda z_BV, k_B1: _halve(_best_blocks(z_BV), k_B1),
        _halve,
        *(z_BV, k_B1),
    )
    return key_BV >= low_B1


def in_blocks(z_BV: Float[Array, "B V"]) -> Float[Array, "B N 128"]:
    """Rows in blocks of `BLOCK` ids, the last one filled up with -inf.

    What fills it has the highest ids, so it comes last even among equals.
    """
    padding = ((0, 0), (0, -z_BV.shape[1] % BLOCK))
    padded_BV = jnp.pad(z_BV, padding, constant_values=-jnp.inf)
    return padded_BV.reshape(z_BV.shape[0], -1, BLOCK)


def _best_blocks(z_BV: Float[Array, "B V"]) -> Float[Array, "B W"]:
    """The blocks of ids with the largest maxima.

    A number outside is exceeded or met by the maximum of each: by `_NUM_BLOCKS` others.
    So what leaves fewer than that many inside leaves none of those outside.
    """
    z_BNS = in_blocks(z_BV)
    block_BJ = jax.lax.top_k(z_BNS.max(-1), _NUM_BLOCKS)[1]
    return jnp.take_along_axis(z_BNS, block_BJ[:, :, None], axis=1).reshape(
        z_BV.shape[0], -1
    )


def _halve(z_BV: Float[Array, "B V"], k_B1: Int[Array, "B 1"]) -> Int[Array, "B 1"]:
    """A key that k numbers of each row reach, or as few more as there are ties.

    Halves the numbers, not their bit patterns: logits lie more evenly.
    """
    key_BV = ordered_bits(z_BV)

    def is_open(low_B1: Array, high_B1: Array, count_B1: Array) -> Bool[Array, "B 1"]:
        # More than k may stay where the k-th ties with others.
        return (count_B1 > k_B1) & (high_B1 > low_B1 + 1) & (k_B1 > 0)

    def halve(state: tuple) -> tuple:
        i, low_B1, high_B1, count_B1 = state
        middle_B1 = jnp.clip(_middle(i, low_B1, high_B1), low_B1 + 1, high_B1 - 1)
        new_B1 = row_sum((key_BV >= middle_B1).astype(jnp.int32))
        is_open_B1 = is_open(low_B1, high_B1, count_B1)
        rises_B1 = is_open_B1 & (new_B1 >= k_B1)
        falls_B1 = is_open_B1 & ~rises_B1
        low_B1 = jnp.where(rises_B1, middle_B1, low_B1)
        high_B1 = jnp.where(falls_B1, middle_B1, high_B1)
        return i + 1, low_B1, high_B1, jnp.where(rises_B1, new_B1, count_B1)

    state = (
        jnp.int32(0),
        jnp.full_like(k_B1, _MINUS_INF_KEY),
        ordered_bits(z_BV.max(-1, keepdims=True)) + 1,
        jnp.full_like(k_B1, z_BV.shape[1]),
    )
    return jax.lax.while_loop(lambda s: is_open(*s[1:]).any(), halve, state)[1]


def _middle(
    i: Int[Array, ""], low_B1: Int[Array, "B 1"], high_B1: Int[Array, "B 1"]
) -> Int[Array, "B 1"]:
    """The key to try in pass i between two others: of the mean of their numbers.

    Where no bound below is known, the numbers go down in steps that double.
    """
    low, high = _number(low_B1), _number(high_B1)
    drop = _FIRST_DROP * jnp.exp2(i.astype(jnp.float32))
    middle = jnp.where(low_B1 == _MINUS_INF_KEY, high - drop, low / 2 + high / 2)
    # Overflow-free mean of two int32, rounded down.
    key_mean_B1 = (low_B1 & high_B1) + ((low_B1 ^ high_B1) >> 1)
    is_odd = (i >= _MAX_HALVINGS) | ~jnp.isfinite(middle)
    return jnp.where(is_odd, key_mean_B1, ordered_bits(middle))
