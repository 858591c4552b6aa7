"""Bits of the attention kernels: a row's output follows from the row alone."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.scripts import selfcheck_cases as cases
from headrace.scripts.selfcheck_cases import Case
from headrace.scripts.selfcheck_device import (
    Setup,
    compile_program,
    error_text,
    in_threads,
    require_device,
)
from headrace.scripts.selfcheck_kernels import argument_shapes, arguments, attention
from headrace.scripts.selfcheck_report import Part
from headrace.scripts.selfcheck_shapes import bits_shapes


def bits(part: Part, setup: Setup) -> None:
    """A row's output bits follow from the row alone.

    Raises:
      DeviceLost: see `against_truth`.
    """
    shapes = bits_shapes(setup.is_smoke)
    made = [cases.make_case(s, setup.seed + i) for i, s in enumerate(shapes)]
    sizes = [_row_counts(len(shape.rows), setup.is_smoke) for shape in shapes]

    def prepare(case: Case, count: int) -> Any:
        some = case.with_rows(range(count))
        attend = attention(
            case.shape, implementation="mosaic_gpu", is_smoke=setup.is_smoke
        )
        return compile_program(attend, argument_shapes(some))

    keys = [(i, count) for i, counts in enumerate(sizes) for count in counts]
    tasks = [functools.partial(prepare, made[i], count) for i, count in keys]
    programs = dict(zip(keys, in_threads(setup, tasks), strict=True))
    for i, case in enumerate(made):
        own = {count: programs[i, count] for count in sizes[i]}
        try:
            for error in own.values():
                if isinstance(error, Exception):
                    raise error
            for name, same in _comparisons(case, own, setup.seed):
                part.check(f"{case.shape.name}: {name}", same)
        except Exception as error:  # noqa: BLE001 - the others still run
            part.check(case.shape.name, False, error=error_text(error))
            require_device()


def _row_counts(most: int, is_smoke: bool) -> list[int]:
    """Rows of the programs that are compared, the most first."""
    return [most, 1] if is_smoke else sorted({most, most // 2, 1}, reverse=True)


def _comparisons(
    case: Case, programs: dict[int, Any], seed: int
) -> Iterator[tuple[str, bool]]:
    """(what was changed, whether the rows' valid queries kept their bits)."""
    B, rng = len(case.shape.rows), np.random.default_rng(seed)

    def run(case: Case) -> np.ndarray:
        return np.asarray(programs[len(case.shape.rows)](*arguments(case)))

    def is_same(found: np.ndarray, rows: Any) -> bool:
        pairs = zip(found, list(rows), strict=True)
        return all(
            out[valid_BT[row]].tobytes() == together[row][valid_BT[row]].tobytes()
            for out, row in pairs
        )

    valid_BT, together = case.valid_BT, run(case)
    yield "two runs", is_same(run(case), range(B))
    order = rng.permutation(B).tolist()
    yield "rows in other places", is_same(run(case.with_rows(order)), order)
    live = [b for b in range(B) if case.arrays["context_len_B"][b]]
    kept = live[-1]
    quiet = dict(case.arrays)
    quiet["context_len_B"] = np.where(np.arange(B) == kept, quiet["context_len_B"], 0)
    quiet["context_len_B"] = quiet["context_len_B"].astype(np.int32)
    alone = run(dataclasses.replace(case, arrays=quiet))
    yield "the others inactive", is_same(alone[[kept]], [kept])
    q_BTKGH = case.q_BTKGH.copy()
    others = [b for b in range(B) if b != kept]
    q_BTKGH[others] = q_BTKGH[others][::-1] * 3
    changed = run(dataclasses.replace(case, q_BTKGH=q_BTKGH))
    yield "other neighbours", is_same(changed[[kept]], [kept])
    for count in sorted(programs)[:-1]:
        picks = [rng.permutation(live)[:count].tolist() for _ in range(2)]
        same = all(is_same(run(case.with_rows(rows)), rows) for rows in picks)
        yield f"a batch of {count}", same
