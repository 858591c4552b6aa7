"""Turns logits into tokens: token = f(seed, position, logits), and nothing else.

The noise is a counter-based hash of (seed, position, token id), so it needs no key
array, is the same for a sharded vocabulary, and a token depends on no neighbour. The
vocabulary is never sorted: see thresholds.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from headrace.engine.thresholds import (
    BLOCK,
    in_blocks,
    keep_from_largest,
    row_sum,
    top_k_by_digits,
    top_k_by_halving,
)


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
    # 23 bits and a half: it and 1 less it are exact in float32, never 0 and never 1.
    uniform_BV = ((h_BV >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2**-23)
    return -jnp.log(-jnp.log(1 - uniform_BV))


def keep_top_k(
    z_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"]
) -> Bool[Array, "B V"]:
    """The k largest of each row (ties with the k-th kept); k = 0 keeps all."""
    k_B1 = top_k_B[:, None]
    kept_BV = jax.lax.platform_dependent(
        z_BV, k_B1, cpu=top_k_by_halving, default=top_k_by_digits
    )
    return kept_BV | (k_B1 <= 0)


def _top_p_weights(
    z_BV: Float[Array, "B V"], p_B1: Float[Array, "B 1"]
) -> tuple[Float[Array, "B V"], Float[Array, "B 1"]]:
    """Unnormalised probabilities, and how much of them the kept set must hold."""
    weight_BV = jnp.exp(z_BV - z_BV.max(-1, keepdims=True))
    # A p that underflows still keeps the likeliest, whose weight is 1.
    tiny = jnp.finfo(jnp.float32).tiny
    return weight_BV, jnp.maximum(p_B1 * row_sum(weight_BV), tiny)


def keep_top_p(
    z_BV: Float[Array, "B V"], top_p_B: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """The smallest set of likeliest tokens with mass of at least p; 1 keeps all.

    Source: Holtzman et al. 2020, equation 2 (nucleus sampling).
    """
    p_B1 = top_p_B[:, None]
    weight_BV, wanted_B1 = _top_p_weights(z_BV, p_B1)

    def holds(above_B3V: Bool[Array, "B 3 V"]) -> Bool[Array, "B 3"]:
        mass_B31 = row_sum(jnp.where(above_B3V, weight_BV[:, None, :], 0))
        return mass_B31[:, :, 0] >= wanted_B1

    return keep_from_largest(holds, z_BV) | (p_B1 >= 1)


def best_in_top_p(
    z_BV: Float[Array, "B V"],
    score_BV: Float[Array, "B V"],
    top_p_B: Float[Array, " B"],
) -> Int[Array, " B"]:
    """The token of the best score among those that top-p keeps, the lowest id first."""
    return jax.lax.platform_dependent(
        z_BV, score_BV, top_p_B, cpu=best_by_trial, default=best_by_threshold
    )


def best_by_threshold(
    z_BV: Float[Array, "B V"],
    score_BV: Float[Array, "B V"],
    top_p_B: Float[Array, " B"],
) -> Int[Array, " B"]:
    """As `best_in_top_p`: first which tokens are kept, then the best of them."""
    return sample_greedy(jnp.where(keep_top_p(z_BV, top_p_B), score_BV, -jnp.inf))


def best_by_trial(
    z_BV: Float[Array, "B V"],
    score_BV: Float[Array, "B V"],
    top_p_B: Float[Array, " B"],
) -> Int[Array, " B"]:
    """As `best_in_top_p`: first the best of all, then whether it is kept.

    It is where what is likelier does not hold enough mass. If it is not, neither is
    anything as unlikely, and the search goes on among what is likelier. Under noise
    few trials do: each is kept with probability p at least.
    """
    p_B1 = top_p_B[:, None]
    weight_BV, wanted_B1 = _top_p_weights(z_BV, p_B1)

    def likelier(token_B: Int[Array, " B"]) -> Bool[Array, "B V"]:
        return z_BV > jnp.take_along_axis(z_BV, token_B[:, None], axis=1)

    def is_out(token_B: Int[Array, " B"]) -> Bool[Array, " B"]:
        mass_B1 = row_sum(jnp.where(likelier(token_B), weight_BV, 0))
        return ((mass_B1 >= wanted_B1) & (p_B1 < 1))[:, 0]

    def try_next(state: tuple) -> tuple:
        token_B, is_out_B = state
        rest_BV = jnp.where(likelier(token_B), score_BV, -jnp.inf)
        token_B = jnp.where(is_out_B, sample_greedy(rest_BV), token_B)
        return token_B, is_out(token_B)

    token_B = sample_greedy(score_BV)
    state = (token_B, is_out(token_B))
    return jax.lax.while_loop(lambda state: state[1].any(), try_next, state)[0]


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
    z_BNS = in_blocks(z_BV)
    block_B = jnp.argmax(z_BNS.max(-1), axis=-1)
    z_BS = jnp.take_along_axis(z_BNS, block_B[:, None, None], axis=1)[:, 0]
    token_B = block_B * BLOCK + jnp.argmax(z_BS, axis=-1)
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
    rows = (z_BV, seed_B2, position_B, temperature_B, top_k_B, top_p_B, min_p_B)

    def only_if_asked(*rows: Array) -> Int[Array, " B"]:
        any_draws = jnp.any(rows[3] > 0)
        return jax.lax.cond(any_draws, _draw, lambda z, *_: sample_greedy(z), *rows)

    # The noise is half of the work on a CPU and nothing on a GPU, which would wait.
    return jax.lax.platform_dependent(*rows, cpu=only_if_asked, default=_draw)


def filtered_scores(
    z_BV: Float[Array, "B V"],
    *,
    temperature_B: Float[Array, " B"],
    top_k_B: Int[Array, " B"],
    top_p_B: Float[Array, " B"],
    min_p_B: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Logarithms, up to a constant, of what `sample_tokens` draws from.

    Tokens that filters leave out are -inf; a greedy row has one token.
    """
    greedy_B1 = (temperature_B == 0)[:, None]
    scaled_BV = _scaled(z_BV, greedy_B1, temperature_B, min_p_B)
    scaled_BV = jnp.where(keep_top_k(scaled_BV, top_k_B), scaled_BV, -jnp.inf)
    scaled_BV = jnp.where(keep_top_p(scaled_BV, top_p_B), scaled_BV, -jnp.inf)
    best_B1 = sample_greedy(z_BV)[:, None]
    is_best_BV = jnp.arange(z_BV.shape[1], dtype=jnp.int32) == best_B1
    return jnp.where(greedy_B1, jnp.where(is_best_BV, 0, -jnp.inf), scaled_BV)


def _scaled(
    z_BV: Float[Array, "B V"],
    greedy_B1: Bool[Array, "B 1"],
    temperature_B: Float[Array, " B"],
    min_p_B: Float[Array, " B"],
) -> Float[Array, "B V"]:
    scaled_BV = z_BV / jnp.where(greedy_B1, 1, temperature_B[:, None])
    return jnp.where(keep_min_p(scaled_BV, min_p_B), scaled_BV, -jnp.inf)


def _draw(
    z_BV: Float[Array, "B V"],
    seed_B2: UInt[Array, "B 2"],
    position_B: Int[Array, " B"],
    temperature_B: Float[Array, " B"],
    *filters_B: Array,
) -> Int[Array, " B"]:
    top_k_B, top_p_B, min_p_B = filters_B
    greedy_B1 = (temperature_B == 0)[:, None]
    scaled_BV = _scaled(z_BV, greedy_B1, temperature_B, min_p_B)
    # A search that no row asks for is skipped; for the others it changes nothing.
    scaled_BV = jax.lax.cond(
        jnp.any(top_k_B > 0),
        lambda z: jnp.where(keep_top_k(z, top_k_B), z, -jnp.inf),
        lambda z: z,
        scaled_BV,
    )
    noise_BV = gumbel_noise(seed_B2, position_B, z_BV.shape[-1])
    score_BV = jnp.where(greedy_B1, z_BV, scaled_BV + noise_BV)
    return jax.lax.cond(
        jnp.any(top_p_B < 1),
        best_in_top_p,
        lambda z, score, p: sample_greedy(score),
        scaled_BV,
        score_BV,
        top_p_B,
    )
