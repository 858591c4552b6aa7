"""What the engine asks of the device: free memory, and room for the parameters."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import psutil

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.engine.sizing import DeviceFacts
from headrace.layers.quantized import is_quantized, tree_bytes
from headrace.pallas_kernels.gpu_target import gpu_capability


def device_facts(weights: Any = None) -> DeviceFacts:
    """Platform and free bytes of the default device, and of the host beside it.

    Args:
      weights: parameters that sizing counts itself: where they are placed already,
        their memory counts as free.
    """
    leaves = jax.tree.leaves(weights)
    placed = tree_bytes([x for x in leaves if isinstance(x, jax.Array)])
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return DeviceFacts(
            platform=device.platform,
            free_bytes=free + placed,
            host_free_bytes=psutil.virtual_memory().available,
            capability=gpu_capability(),
        )
    free = psutil.virtual_memory().available
    return DeviceFacts(platform=device.platform, free_bytes=free + placed)


def with_weights_of(checkpoint: Checkpoint, facts: DeviceFacts) -> DeviceFacts:
    """Facts that know the bytes of weights which came quantized, in any mixture."""
    if checkpoint.quantization_skip is None:
        return facts
    return dataclasses.replace(facts, weights_bytes=tree_bytes(checkpoint.params))


def place_params(params: Any, dtype: str) -> Any:
    """Moves parameters to the default device; those that are there stay.

    What stands in several places of the tree is moved once.

    Args:
      params: the tree.
      dtype: of those that are not quantized, nor whole numbers.
    """
    moved: dict[int, Any] = {}

    def place(leaf: Any) -> Any:
        if id(leaf) not in moved:
            is_as_it_is = is_quantized(leaf) or jnp.issubdtype(leaf.dtype, jnp.integer)
            moved[id(leaf)] = (
                jax.tree.map(jnp.asarray, leaf)
                if is_as_it_is
                else jnp.asarray(leaf, jnp.dtype(dtype))
            )
        return moved[id(leaf)]

    return jax.tree.map(place, params, is_leaf=is_quantized)


def layout_of_quantized(params: Any) -> str:
    """What programs depend on of weights that are quantized; else empty."""
    if not any(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))):
        return ""
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape}", params)
    return str(jax.tree_util.tree_flatten_with_path(shapes))
