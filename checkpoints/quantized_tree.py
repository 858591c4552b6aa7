"""What a parameter tree says of its own quantization."""

import collections
import dataclasses
from typing import Any

import jax

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.configs.schema import EngineConfig
from headrace.layers.quantized import is_quantized, tree_bytes


def quantization_of(params: dict) -> tuple[str | None, tuple[str, ...] | None]:
    """The scheme of the quantized weights, and the parameters that are not of it.

    Where they have several, it is the one of the most bytes. What is listed is planned
    for as if it were not quantized, so that a plan is never below what weights take
    (but for orders of inputs, 4 bytes an input).

    Returns:
      Its name and paths such as "layer_0/qkv"; None and None where none is quantized.
    """
    schemes: dict[str, str | None] = {}
    sizes: collections.Counter[str] = collections.Counter()

    def look(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key, child in node.items():
                look(child, (*path, key))
            return
        leaves = jax.tree.leaves(node, is_leaf=is_quantized)
        if len(leaves) == 1 and len(leaves[0].shape) < 2:
            return
        names = {leaf.scheme.name if is_quantized(leaf) else None for leaf in leaves}
        name = names.pop() if len(names) == 1 else None
        schemes["/".join(path)] = name
        if name is not None:
            sizes[name] += tree_bytes(node)

    look(params, ())
    if not sizes:
        return None, None
    most = sizes.most_common(1)[0][0]
    return most, tuple(sorted(p for p, name in schemes.items() if name != most))


def with_quantization_of(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    """A config that says of the weights what they are."""
    changes: dict[str, Any] = {"quantization": checkpoint.quantization}
    if checkpoint.quantization_skip is not None:
        changes["quantization_skip"] = checkpoint.quantization_skip
    return dataclasses.replace(config, **changes)
