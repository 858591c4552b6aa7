"""What the parts of the self-check share on the device: compiling, timing, roofs.

Times are of many calls in a row, each on the result of the one before, between two
waits for the device: what the host does between calls is hidden behind them.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from headrace.engine.compile_options import compiler_options
from headrace.scripts.selfcheck_report import Part, Roofs, Timing

# Programs compiled at the same time on a machine with a GPU.
_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a run of the parts is told.

    Attributes:
      seed: of everything random.
      is_smoke: there is no GPU; shapes are tiny, kernels are interpreted.
      compares_options: time a decode step with other compiler options, too.
      roofs: of the part `card`; not known before it.
    """

    seed: int
    is_smoke: bool
    compares_options: bool = True
    roofs: Roofs = dataclasses.field(default_factory=Roofs)


class DeviceLost(Exception):
    """The device answers no more: nothing else can run in this process."""


def compile_program(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    donated: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
) -> Any:
    """Compiles as the engine does; `options` replace the engine's.

    Args:
      function: to be compiled.
      args: arrays, or their shapes.
      donated: places of `args` whose memory the results may take.
      options: of XLA.
    """
    if options is None:
        options = compiler_options(jax.default_backend())
    lowered = jax.jit(function, donate_argnums=donated).lower(*args)
    return lowered.compile(compiler_options=options or None)


def time_chain(
    call: Callable[[Any], Any], start: Any, *, calls: int, repeats: int = 5
) -> tuple[Timing, Any]:
    """Times `call(call(... call(start)))`.

    Args:
      call: takes what it returned the time before; it may donate it.
      start: the first argument.
      calls: in a row, between two waits.
      repeats: of that.

    Returns:
      Seconds of one call, and the last result.
    """
    state = jax.block_until_ready(call(start))
    repeats_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        for _ in range(calls):
            state = call(state)
        jax.block_until_ready(state)
        repeats_s.append(time.perf_counter() - begin_s)
    return Timing.of(repeats_s, calls), state


def in_threads(setup: Setup, tasks: list[Callable[[], Any]]) -> Iterator[Any]:
    """Runs tasks side by side; in order, each one's result or the exception it raised.

    Whoever stops asking gets no further task begun.
    """

    def guarded(task: Callable[[], Any]) -> Any:
        try:
            return task()
        except Exception as error:  # noqa: BLE001 - one that fails leaves the others
            return error

    # The interpreter's kernels share state, and a CPU's cores are few.
    threads = 1 if setup.is_smoke else _THREADS
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        yield from pool.map(guarded, tasks)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def require_device() -> None:
    """Nothing where the device still computes.

    Raises:
      DeviceLost: an earlier failure has taken it down with all that is on it.
    """
    try:
        is_well = bool(jnp.ones(8).sum() == 8)
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing runs any more
        raise DeviceLost(error_text(error)) from error
    if not is_well:
        raise DeviceLost("8 ones do not sum to 8")


def error_text(error: BaseException) -> str:
    """Kind and message in a line of 400 characters at most."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def card(part: Part, setup: Setup) -> Roofs:
    """Name and versions, and the roofs that the rest is held against.

    Returns:
      The roofs; without a GPU nothing is known.
    """
    part.facts(**describe_card())
    part.say(", ".join(f"{k} {v}" for k, v in describe_card().items()))
    words = 2**16 if setup.is_smoke else 2**30
    copy = compile_program(jnp.negative, (jax.ShapeDtypeStruct((words,), jnp.int32),))
    timing, _ = time_chain(copy, jnp.arange(words, dtype=jnp.int32), calls=10)
    num_bytes = 2 * 4 * words
    copy_bytes_per_s = num_bytes / timing.best_s
    part.measure(
        "copy, read and written",
        copy_bytes_per_s,
        "B/s",
        share=_of_vendor("bytes_per_s", copy_bytes_per_s),
        median=num_bytes / timing.median_s,
    )
    size = 256 if setup.is_smoke else 8192
    keys = jax.random.split(jax.random.key(setup.seed))
    a, b = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    b = b * size**-0.5

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    # The roof is the best that XLA finds, whatever the engine's options are.
    program = compile_program(product, (a, b), options={})
    timing, _ = time_chain(lambda x: program(x, b), a, calls=20)
    matmul_flops_per_s = 2 * size**3 / timing.best_s
    part.measure(
        f"product of {size} x {size} in bfloat16",
        matmul_flops_per_s,
        "FLOP/s",
        share=_of_vendor("flops_per_s", matmul_flops_per_s),
        median=2 * size**3 / timing.median_s,
    )
    if setup.is_smoke:
        return Roofs()
    return Roofs(
        copy_bytes_per_s=copy_bytes_per_s, matmul_flops_per_s=matmul_flops_per_s
    )


def describe_card() -> dict[str, Any]:
    """Name, compute capability and memory of the device, and jax's versions."""
    import jaxlib
    import numpy as np

    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return {
        "card": device.device_kind,
        "platform": device.platform,
        "capability": str(getattr(device, "compute_capability", None)),
        "memory_bytes": (stats or {}).get("bytes_limit"),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
        "backend": device.client.platform_version.splitlines()[0],
    }


def vendor(field: str) -> float | None:
    """The vendor's "bytes_per_s" or "flops_per_s" of this card; None if not known."""
    from headrace.scripts.gpu_compile import read_target, target_names
    from headrace.scripts.preflight_model import DENSE_FLOPS

    kind = jax.devices()[0].device_kind.upper()
    for name in target_names():
        if name.split("_")[0].upper() in kind.split():
            if field == "flops_per_s":
                return DENSE_FLOPS.get(name)
            return float(read_target(name).bytes_per_s)
    return None


def _of_vendor(field: str, value: float) -> float | None:
    figure = vendor(field)
    return None if figure is None else value / figure
