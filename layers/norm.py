"""Root-mean-square normalisation, computed in float32 whatever the storage type."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x_XD: Float[Array, "*X D"], scale_D: Float[Array, " D"], eps: float
) -> Float[Array, "*X D"]:
    """Scales each row to unit mean square.

    Source: Zhang and Sennrich 2019, equation 4.
    """
    x32_XD = x_XD.astype(jnp.float32)
    mean_X1 = jnp.mean(x32_XD * x32_XD, axis=-1, keepdims=True)
    y_XD = x32_XD * jax.lax.rsqrt(mean_X1 + eps) * scale_D.astype(jnp.float32)
    return y_XD.astype(x_XD.dtype)
