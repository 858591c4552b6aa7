"""Root-mean-square normalisation, computed in float32 whatever the storage type."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x_XD: Float[Array, "*X D"], scale_D: Float[Array, " D"], eps: float
) -> Float[Array, "*X D"]:
    """Scales each row to unit mean square.

    A row's bits do not depend on the number of rows.

    Source: Zhang and Sennrich 2019, equation 4.
    """
    x32_XD = x_XD.astype(jnp.float32)
    mean_X1 = jax.lax.platform_dependent(
        jnp.square(x32_XD), cpu=_mean_in_halves, default=_mean
    )
    y_XD = x32_XD * jax.lax.rsqrt(mean_X1 + eps) * scale_D.astype(jnp.float32)
    return y_XD.astype(x_XD.dtype)


def _mean(y_XD: Float[Array, "*X D"]) -> Float[Array, "*X 1"]:
    return jnp.mean(y_XD, axis=-1, keepdims=True)


def _mean_in_halves(y_XD: Float[Array, "*X D"]) -> Float[Array, "*X 1"]:
    """The mean as a fixed tree of sums: the one half plus the other, and again.

    What XLA makes of a sum on a CPU adds in another order for fewer rows: under 8 on
    one processor, up to 8 on another. Sums of whole arrays leave it no choice.
    """
    size = y_XD.shape[-1]
    while (half := y_XD.shape[-1] // 2) > 0:
        rest_XD = y_XD[..., 2 * half :]
        y_XD = y_XD[..., :half] + y_XD[..., half : 2 * half]
        if rest_XD.shape[-1]:
            y_XD = jnp.concatenate([y_XD[..., :-1], y_XD[..., -1:] + rest_XD], axis=-1)
    return y_XD / size
