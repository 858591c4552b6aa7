"""Attention kernels against the float32 truth, and against plain XLA.

What no interpreter can run comes first, in a part of its own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.paged_attention import api
from headrace.pallas_kernels.paged_attention.api import AttentionOptions
from headrace.scripts import selfcheck_cases as cases
from headrace.scripts.selfcheck_cases import Case, Shape
from headrace.scripts.selfcheck_device import (
    Setup,
    compile_program,
    error_text,
    in_threads,
    require_device,
)
from headrace.scripts.selfcheck_report import Part
from headrace.scripts.selfcheck_shapes import (
    decode_shapes,
    prefill_256_shapes,
    prefill_shapes,
)

# Largest absolute error over the largest absolute true value.
LIMIT = 1e-2
# Times the error of plain XLA. Over 8-bit pages the weights, which the kernel keeps in
# bfloat16, take the scales of the values, so that a lone key rounds once more.
TIMES_XLA, TIMES_XLA_NARROW = 2.0, 3.0


def attention(shape: Shape, *, implementation: str, is_smoke: bool) -> Callable:
    """A function of (queries, pools, arrays, layer) that attends one way."""
    options = AttentionOptions(window=shape.window, soft_cap=shape.soft_cap)
    interpret = None
    if is_smoke and implementation == "mosaic_gpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams(detect_races=False)

    def attend(
        q_BTKGH: Any, pools: Any, arrays: dict[str, Any], layer: int = cases.LAYER
    ) -> Any:
        return api.paged_attention(
            q_BTKGH,
            pools,
            layer,
            options=options,
            implementation=implementation,  # type: ignore[arg-type]
            interpret=interpret,
            **arrays,
        )

    return attend


def arguments(case: Case) -> tuple[Any, ...]:
    """What `attention`'s function takes, on the device."""
    return jax.tree.map(jnp.asarray, (case.q_BTKGH, case.pools, case.arrays))


def argument_shapes(case: Case) -> tuple[Any, ...]:
    """What `arguments` would give, as shapes."""
    args = case.q_BTKGH, case.pools, case.arrays
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)


def prefill_256(part: Part, setup: Setup) -> None:
    """The one form that no interpreter has run."""
    against_truth(part, setup, prefill_256_shapes(setup.is_smoke))


def decode(part: Part, setup: Setup) -> None:
    """Few query tokens a row."""
    against_truth(part, setup, decode_shapes(setup.is_smoke))


def prefill(part: Part, setup: Setup) -> None:
    """Chunks of prompts."""
    against_truth(part, setup, prefill_shapes(setup.is_smoke))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    case: Case
    truth: np.ndarray
    programs: dict[str, Any]


def against_truth(part: Part, setup: Setup, shapes: list[Shape]) -> None:
    """Runs each shape by the kernel and by plain XLA; checks the kernel's error.

    Raises:
      DeviceLost: a kernel took the device down; what was left is checked no more.
    """

    def prepare(index: int) -> _Prepared:
        shape = shapes[index]
        case = cases.make_case(shape, setup.seed + index)
        args = argument_shapes(case)
        programs = {
            name: compile_program(
                attention(shape, implementation=name, is_smoke=setup.is_smoke), args
            )
            for name in ("mosaic_gpu", "xla")
        }
        return _Prepared(case=case, truth=cases.truth(case), programs=programs)

    tasks = [functools.partial(prepare, index) for index in range(len(shapes))]
    for shape, ready in zip(shapes, in_threads(setup, tasks), strict=True):
        try:
            if isinstance(ready, Exception):
                raise ready
            errors = _errors(ready)
        except Exception as error:  # noqa: BLE001 - the others still run
            part.check(shape.name, False, error=error_text(error))
            require_device()
            continue
        times = TIMES_XLA_NARROW if shape.is_narrow else TIMES_XLA
        kernel, plain = errors["mosaic_gpu"], errors["xla"]
        is_met = kernel < LIMIT and kernel <= times * plain
        part.check(shape.name, is_met, error=kernel, plain_xla=plain)


def _errors(ready: _Prepared) -> dict[str, float]:
    """Each implementation's relative error."""
    args, found = arguments(ready.case), {}
    for name, program in ready.programs.items():
        out = np.asarray(program(*args))
        found[name] = cases.relative_error(out, ready.truth, ready.case.valid_BT)
        # Padding may be anything that is finite.
        if not np.isfinite(out.astype(np.float32)).all():
            found[name] = float("inf")
    return found
