"""How many threads the device's programs use on this machine. No jax."""

import os


def num_threads() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
