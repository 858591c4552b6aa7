"""Root-mean-square normalisation, computed in float32 whatever the storage type."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# XLA on a CPU adds up the squares of fewer rows in another order.
_LEAST_ROWS = 8


def rms_norm(
    x_XD: Float[Array, "*X D"], scale_D: Float[Array, " D"], eps: float
) -> Float[Array, "*X D"]:
    """Scales each row to unit mean square.

    A row's bits do not depend on the number of rows.

    Source: Zhang and Sennrich 2019, equation 4.
    """
    x32_XD = x_XD.astype(jnp.float32)
    square_RD = jnp.square(x32_XD).reshape(-1, x_XD.shape[-1])
    rows = math.prod(x_XD.shape[:-1])
    short = max(0, _LEAST_ROWS - rows)
    mean_R = jnp.mean(jnp.pad(square_RD, ((0, short), (0, 0))), axis=-1)[:rows]
    mean_X1 = mean_R.reshape(*x_XD.shape[:-1], 1)
    y_XD = x32_XD * jax.lax.rsqrt(mean_X1 + eps) * scale_D.astype(jnp.float32)
    return y_XD.astype(x_XD.dtype)
