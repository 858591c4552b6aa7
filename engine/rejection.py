"""Accepts drafts by rejection sampling: exact in distribution, not token for token.

Sources: Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from headrace.engine.sampler import gumbel_noise, sample_greedy
from headrace.engine.thresholds import row_sum

# Turn a request's seed into those of noise that no draft was drawn with.
_COIN, _RESIDUAL = 0x5851F42D, 0x14057B7E


def accept_or_resample(
    target_BV: Float[Array, "B V"],
    draft_B: Int[Array, " B"],
    draft_BV: Float[Array, "B V"] | None,
    *,
    seed_B2: UInt[Array, "B 2"],
    position_B: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The draft with probability min(1, p / q), else a token of what p has over q.

    The token is the draft only where it was accepted, so it follows the target's
    distribution whatever the draft's is, as long as the draft was drawn from it.

    Args:
      target_BV: logarithms of p up to a constant, -inf for what filters leave out.
      draft_B: ids drawn from q; rows with -1 give what nobody may use.
      draft_BV: of q likewise; None where a draft is certain.
      seed_B2, position_B: counters of the noise, as for `sample_tokens`.
    """
    V = target_BV.shape[1]
    is_draft_BV = jnp.arange(V, dtype=jnp.int32) == draft_B[:, None]
    p_BV = _probabilities(target_BV)
    q_BV = is_draft_BV.astype(p_BV.dtype)
    if draft_BV is not None:
        q_BV = _probabilities(draft_BV)
    p_B, q_B = (row_sum(jnp.where(is_draft_BV, x_BV, 0))[:, 0] for x_BV in (p_BV, q_BV))
    coin_B2 = gumbel_noise(seed_B2 ^ jnp.uint32(_COIN), position_B, 1)
    uniform_B = jnp.exp(-jnp.exp(-coin_B2[:, 0]))
    over_BV = jnp.maximum(p_BV - q_BV, 0)
    # Rounding alone may reject where p equals q; then any token of p will do.
    over_BV = jnp.where(row_sum(over_BV) > 0, over_BV, p_BV)
    noise_BV = gumbel_noise(seed_B2 ^ jnp.uint32(_RESIDUAL), position_B, V)
    other_B = sample_greedy(jnp.log(over_BV) + noise_BV)
    return jnp.where(uniform_B * q_B < p_B, draft_B, other_B)


def _probabilities(scores_BV: Float[Array, "B V"]) -> Float[Array, "B V"]:
    weight_BV = jnp.exp(scores_BV - scores_BV.max(-1, keepdims=True))
    return weight_BV / row_sum(weight_BV)
