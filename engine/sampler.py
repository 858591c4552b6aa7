"""Turns logits into tokens: token = f(seed, position, logits), and nothing else.

The noise is a counter-based hash of (seed, position, token id), so it needs no key
array, is the same for a sharded vocabulary, and a token depends on no neighbour. The
vocabulary is never sorted: top-k and top-p find their thresholds by bisection over
the ordered bit patterns of the logits, 32 passes, exact.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

_ARGMAX_BLOCK = 128


def _mix(h: UInt[Array, "*X"]) -> UInt[Array, "*X"]:
    """Murmur3's 32-bit finaliser: every input bit flips half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def gumbel_noise(
    seed_B2: UInt[Array, "B 2"], position_B: Int[Array, " B"], vocab_size: int
) -> Float[Array, "B V"]:
    """Gumbel(0, 1) noise per token id, a pure function of its three counters.

    Args:
      seed_B2: low and high word of each row's seed.
      position_B: position of the token to be sampled.
      vocab_size: V.

    Source: Salmon et al. 2011 (counter-based generators); Gumbel-max trick.
    """
    position = position_B.astype(jnp.uint32)
    a_B = _mix(seed_B2[:, 0] ^ _mix(position + jnp.uint32(0x9E3779B9)))
    b_B = _mix(seed_B2[:, 1] + _mix(position ^ jnp.uint32(0x7F4A7C15)) + a_B)
    token_V = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    h_BV = _mix(_mix(token_V[None, :] + a_B[:, None]) ^ b_B[:, None])
    # 23 bits and a half: exact in float32, never 0 and never 1.
    uniform_BV = ((h_BV >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log1p(-uniform_BV))


def _ordered_bits(x: Float[Array, "*X"]) -> Int[Array, "*X"]:
    """Maps float32 to int32 so that the order of numbers is the order of ints."""
    bits = jax.lax.bitcast_convert_type(x + 0.0, jnp.int32)  # -0.0 becomes 0.0
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _bisect(
    holds: Callable[[Bool[Array, "B V"]], Bool[Array, "B 1"]], key_BV: Int[Array, "B V"]
) -> Int[Array, "B 1"]:
    """Largest t per row with holds(key >= t); holds is true for the smallest t."""

    def halve(_: Int[Array, ""], bounds: tuple) -> tuple:
        low, high = bounds  # holds(low), not holds(high)
        # Overflow-free mean of two int32, rounded down.
        middle = (low & high) + ((low ^ high) >> 1)
        good = holds(key_BV >= middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low = jnp.full((key_BV.shape[0], 1), -(2**31), jnp.int32)
    high = jnp.full_like(low, 2**31 - 1)
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]


def keep_top_k(
    z_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"]
) -> Bool[Array, "B V"]:
    """The k largest of each row (ties with the k-th kept); k = 0 keeps all."""
    key_BV = _ordered_bits(z_BV)
    k_B1 = top_k_B[:, None]

    def holds(above_BV: Bool[Array, "B V"]) -> Bool[Array, "B 1"]:
        return above_BV.sum(-1, keepdims=True, dtype=jnp.int32) >= k_B1

    return (key_BV >= _bisect(holds, key_BV)) | (k_B1 <= 0)


def keep_top_p(
    z_BV: Float[Array, "B V"], top_p_B: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The smallest set of likeliest tokens with mass of at least p; 1 keeps all.

    Source: Holtzman et al. 2020, equation 2 (nucleus sampling).
    """
    weight_BV = jnp.exp(z_BV - z_BV.max(-1, keepdims=True))
    key_BV = _ordered_bits(z_BV)
    p_B1 = top_p_B[:, None]
    wanted_B1 = p_B1 * weight_BV.sum(-1, keepdims=True)
    # A p that underflows still keeps the likeliest, whose weight is 1.
    wanted_B1 = jnp.maximum(wanted_B1, jnp.finfo(jnp.float32).tiny)

    def holds(above_BV: Bool[Array, "B V"]) -> Bool[Array, "B 1"]:
        mass_B1 = jnp.where(above_BV, weight_BV, 0).sum(-1, keepdims=True)
        return mass_B1 >= wanted_B1

    return (key_BV >= _bisect(holds, key_BV)) | (p_B1 >= 1)


def keep_min_p(
    z_BV: Float[Array, "B V"], min_p_B: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Tokens at least `min_p` times as likely as the likeliest; 0 keeps all.

    Source: Nguyen et al. 2024, section 3 (min-p).
    """
    top_B1 = z_BV.max(-1, keepdims=True)
    return z_BV >= top_B1 + jnp.log(min_p_B)[:, None]


def sample_greedy(z_BV: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The likeliest token; the lowest id wins a tie.

    In two levels, of blocks and of ids within one: a maximum is vectorized on every
    backend, where `argmax` over a whole row took ten times as long on a CPU.
    """
    B, V = z_BV.shape
    short = -V % _ARGMAX_BLOCK
    padded_BV = jnp.pad(z_BV, ((0, 0), (0, short)), constant_values=-jnp.inf)
    z_BNS = padded_BV.reshape(B, -1, _ARGMAX_BLOCK)
    block_B = jnp.argmax(z_BNS.max(-1), axis=-1)
    z_BS = jnp.take_along_axis(z_BNS, block_B[:, None, None], axis=1)[:, 0]
    token_B = block_B * _ARGMAX_BLOCK + jnp.argmax(z_BS, axis=-1)
    return token_B.astype(jnp.int32)


def sample_tokens(
    z_BV: Float[Array, "B V"],
    *,
    seed_B2: UInt[Array, "B 2"],
    position_B: Int[Array, " B"],
    temperature_B: Float[Array, " B"],
    top_k_B: Int[Array, " B"],
    top_p_B: Float[Array, " B"],
    min_p_B: Float[Array, " B"],
) -> Int[Array, " B"]:
    """Samples one token a row: temperature, min-p, top-k, top-p, then noise.

    Args:
      z_BV: float32 logits.
      seed_B2, position_B: counters of the noise.
      temperature_B: 0 is greedy, with the same bits as `sample_greedy`.
      top_k_B: 0 is off.
      top_p_B: 1 is off; applied to what top-k left.
      min_p_B: 0 is off.
    """
    greedy_B1 = (temperature_B == 0)[:, None]
    scaled_BV = z_BV / jnp.where(greedy_B1, 1, temperature_B[:, None])
    scaled_BV = jnp.where(keep_min_p(scaled_BV, min_p_B), scaled_BV, -jnp.inf)
    # A search that no row asks for is skipped; for the others it changes nothing.
    scaled_BV = jax.lax.cond(
        jnp.any(top_k_B > 0),
        lambda z: jnp.where(keep_top_k(z, top_k_B), z, -jnp.inf),
        lambda z: z,
        scaled_BV,
    )
    scaled_BV = jax.lax.cond(
        jnp.any(top_p_B < 1),
        lambda z: jnp.where(keep_top_p(z, top_p_B), z, -jnp.inf),
        lambda z: z,
        scaled_BV,
    )
    noise_BV = gumbel_noise(seed_B2, position_B, z_BV.shape[-1])
    return sample_greedy(jnp.where(greedy_B1, z_BV, scaled_BV + noise_BV))


def token_logprobs(
    z_BV: Float[Array, "B V"], token_B: Int[Array, " B"], num_top: int
) -> tuple[
    Float[Array, " B"],
    Int[Array, " B"],
    Int[Array, "B J"],
    Float[Array, "B J"],
]:
    """Natural log-probabilities of the raw logits, before temperature and filters.

    Returns:
      The sampled token's log-probability and its rank (1 = likeliest), then ids and
      log-probabilities of the `num_top` likeliest, or of all where there are fewer.
    """
    top_B1 = z_BV.max(-1, keepdims=True)
    log_total_B1 = jnp.log(jnp.exp(z_BV - top_B1).sum(-1, keepdims=True)) + top_B1
    chosen_B1 = jnp.take_along_axis(z_BV, token_B[:, None], axis=-1)
    rank_B = (z_BV > chosen_B1).sum(-1, dtype=jnp.int32) + 1
    top_BJ, ids_BJ = jax.lax.top_k(z_BV, min(num_top, z_BV.shape[-1]))
    return (chosen_B1 - log_total_B1)[:, 0], rank_B, ids_BJ, top_BJ - log_total_B1
