"""Rows that come in groups of one size, of each of which only the first count."""

import jax.numpy as jnp
from jaxtyping import Array, Int


def valid_rows(num_rows: int, num_valid_B: Int[Array, " B"] | None) -> Array:
    """How many rows at the start of each group count; without groups all do.

    Raises:
      ValueError: the rows are not a multiple of B.
    """
    if num_valid_B is None:
        return jnp.full(1, num_rows, jnp.int32)
    if num_rows % num_valid_B.shape[0]:
        raise ValueError(
            f"{num_rows} rows do not make {num_valid_B.shape[0]} equal groups"
        )
    return num_valid_B
