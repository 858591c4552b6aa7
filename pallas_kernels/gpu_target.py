"""Which GPU the programs are traced for: the one at hand, or one that is named.

Kernels exist per compute capability. A process that compiles for a GPU that is not
there says so with `compiling_for`; nothing else may.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

Capability = tuple[int, int]

_named: contextvars.ContextVar[Capability | None] = contextvars.ContextVar(
    "capability", default=None
)


def gpu_capability() -> Capability | None:
    """Major and minor number, such as (9, 0) for an H100; None without a GPU."""
    if (named := _named.get()) is not None:
        return named
    if jax.default_backend() != "gpu":
        return None
    # "9.0" on NVIDIA; AMD's GPUs have names there, and no kernels here.
    parts = str(getattr(jax.devices()[0], "compute_capability", "")).split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        return None
    return int(parts[0]), int(parts[1])


@contextlib.contextmanager
def compiling_for(capability: Capability) -> Iterator[None]:
    """Programs traced and lowered inside are for this GPU, which need not be there."""
    from headrace.pallas_kernels import compat

    token = _named.set(capability)
    try:
        with compat.lowering_for(capability):
            yield
    finally:
        _named.reset(token)
