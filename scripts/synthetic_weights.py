"""Seeded random weights for any config: for benchmarks and tests without a download.

Same shapes and cost as published weights; the text that comes out means nothing.
"""

import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.configs.schema import ModelConfig
from headrace.layers.models import llama


def synthetic_checkpoint(
    config: ModelConfig, *, seed: int = 0, dtype: str = "float32"
) -> Checkpoint:
    """Draws every matrix from a normal of deviation 1 / sqrt(fan-in); norms are 1.

    Args:
      config: the model.
      seed: same seed, same weights, on every device.
      dtype: storage type.

    Returns:
      A checkpoint without a tokenizer: token ids in, token ids out.
    """
    key = jax.random.key(seed)
    shapes, tree = jax.tree.flatten(llama.param_shapes(config), is_leaf=_is_shape)
    leaves = [
        _draw(jax.random.fold_in(key, index), shape, dtype)
        for index, shape in enumerate(shapes)
    ]
    text = json.dumps([config.to_mapping(), seed], sort_keys=True)
    return Checkpoint(
        config=config,
        params=jax.tree.unflatten(tree, leaves),
        tokenizer=None,
        identity=hashlib.sha256(text.encode()).hexdigest(),
    )


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def _draw(key: Array, shape: tuple[int, ...], dtype: str) -> Float[Array, "..."]:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    # Drawn in the storage type: a float32 copy of a large model would not fit.
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)
