"""Seeded random weights for any config: benchmarks, sharding and feature tests.

Each parameter draws from its own counter-based stream, named by its path, so the
order of making them does not matter and one layer can be made without the others.
"""

import hashlib

import numpy as np

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.shardings import Shardings, placer
from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.configs.schema import ModelConfig
from headrace.layers.models import param_shapes


def synthetic_checkpoint(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: TokenizerSpec | None = None,
    shardings: Shardings = None,
) -> Checkpoint:
    """Random weights of a config's shapes; equal seeds give equal weights.

    Args:
      config: shapes to fill.
      seed: any integer of 64 bits.
      dtype: storage type on the device.
      tokenizer: passed through.
      shardings: see `shardings.Shardings`.
    """
    place = placer(dtype, shardings)

    def fill(shapes: dict, path: tuple[str, ...]) -> dict:
        tree = {}
        for key, value in shapes.items():
            here = (*path, key)
            if isinstance(value, dict):
                tree[key] = fill(value, here)
            else:
                tree[key] = place(here, random_array(here, value, seed))
        return tree

    return Checkpoint(
        config=config,
        params=fill(param_shapes(config), ()),
        tokenizer=tokenizer,
        identity=hashlib.sha256(f"{config}:{seed}".encode()).hexdigest(),
    )


def random_array(
    path: tuple[str, ...], shape: tuple[int, ...], seed: int
) -> np.ndarray:
    """One parameter: norms are 1, weights normal with deviation 1 / sqrt(fan in)."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    digest = hashlib.sha256(f"{seed}:{'/'.join(path)}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8], "big")))
    array = rng.standard_normal(shape, dtype=np.float32)
    array *= np.float32(shape[-1] ** -0.5)
    return array
