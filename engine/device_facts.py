"""What the engine asks of the device: free memory, and room for the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import psutil

from headrace.engine.sizing import DeviceFacts
from headrace.pallas_kernels.gpu_target import gpu_capability


def device_facts() -> DeviceFacts:
    """Platform and free bytes of the default device, and of the host beside it."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return DeviceFacts(
            platform=device.platform,
            free_bytes=free,
            host_free_bytes=psutil.virtual_memory().available,
            capability=gpu_capability(),
        )
    free = psutil.virtual_memory().available
    return DeviceFacts(platform=device.platform, free_bytes=free)


def place_params(params: Any, dtype: str) -> Any:
    """Moves parameters to the default device; those that are there stay."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.dtype(dtype)), params)
