"""The quantized matmul in Mosaic's interpreter, with its race detector, against numpy.

Every ring wraps: races over slots show only where a chain's tiles outnumber its slots.
"""

import dataclasses
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_cases import interpreted, relative_error

from headrace.pallas_kernels.quantized_matmul import api, mosaic_gpu, reference, tuning
from headrace.pallas_kernels.quantized_matmul.tuning import TILE, Tuning

TYPES = {
    "int4": ml_dtypes.int4, "int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn
}  # fmt: skip
# Scales on sums, and on weights; each with more tiles a split than slots.
SUMS = Tuning(
    on_sums=True, splits=2, chains=2, rows=16, outputs=64, consumers=1, stages=2
)
WEIGHTS = Tuning(
    on_sums=False, splits=2, chains=1, rows=16, outputs=64, consumers=2, stages=2
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of the API, as numpy arrays."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    x: np.ndarray

    def truth(self, on_sums):
        """In float64 from what the kernel multiplies: weights that are rounded once."""
        if on_sums:
            return reference.quantized_matmul_reference(
                self.values, self.scales, self.zeros, self.x
            )
        weight = reference.dequantize(self.values, self.scales, self.zeros)
        weight = weight.astype(ml_dtypes.bfloat16).astype(np.float64)
        return self.x.astype(np.float64) @ weight.T

    def rows(self, rows):
        """The same weight with some rows."""
        return dataclasses.replace(self, x=self.x[rows])


def make_case(
    dtype="int4", group=128, *, R=9, outputs=128, inputs=1280, has_zeros=False, seed=0
):
    """Every stored value that the type has; neighbouring scales differ by much."""
    rng = np.random.default_rng(seed)
    shape = outputs, inputs
    if dtype == "float8_e4m3fn":
        bits = rng.integers(0, 256, shape, np.uint8)
        bits[bits & 127 == 127] = 0  # NaN
        values = bits.view(TYPES[dtype])
    else:
        limit = 8 if dtype == "int4" else 128
        values = rng.integers(-limit, limit, shape).astype(TYPES[dtype])
    scales = np.exp2(rng.uniform(-3, 1, (outputs, inputs // group))).astype(np.float32)
    zeros = rng.integers(-8, 8, scales.shape).astype(np.int8) if has_zeros else None
    x = rng.standard_normal((R, inputs)).astype(ml_dtypes.bfloat16)
    return Case(values, scales, zeros, x)


def run(case, sizes, module=mosaic_gpu):
    tiles = case.values.shape[1] // TILE // sizes.splits
    assert tiles > sizes.stages, "the ring does not wrap"

    def call(interpret):
        zeros = None if case.zeros is None else jnp.asarray(case.zeros)
        return module.quantized_matmul_mosaic(
            jnp.asarray(case.values), jnp.asarray(case.scales), zeros,
            jnp.asarray(case.x), out_dtype=jnp.float32, tuning=sizes,
            interpret=interpret,
        )  # fmt: skip

    return interpreted(call)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(group=64, has_zeros=True, R=1),
        dict(group=32),
        dict(group=1280, dtype="int8", R=16),
        dict(group=128, dtype="int8", has_zeros=True),
        dict(group=1280, dtype="float8_e4m3fn"),
        dict(group=256, has_zeros=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [SUMS, WEIGHTS], ids=["sums", "weights"])
def test_equals_the_truth_without_a_race(sizes, options):
    case = make_case(**options)
    out = run(case, sizes)
    assert relative_error(out, case.truth(sizes.on_sums)) < 1e-5


@pytest.mark.parametrize("rows, most", [(3, 64), (33, 64), (20, 512)])
def test_equals_the_truth_with_tuned_sizes(rows, most):
    case = make_case(R=rows, inputs=2560, outputs=256)
    sizes = tuning.tuning(256, 2560, rows=rows, most_rows=most, bits=4)
    # Tuned rings are as deep as such a weight: fewer slots, so that they wrap.
    sizes = dataclasses.replace(sizes, stages=2)
    out = run(case, sizes)
    assert relative_error(out, case.truth(sizes.on_sums)) < 1e-5


def test_rows_beyond_a_program_are_of_other_programs():
    case = make_case(R=37)
    out = run(case, WEIGHTS)
    assert relative_error(out, case.truth(on_sums=False)) < 1e-5


@pytest.mark.parametrize("most", [64, 512])
def test_a_rows_bits_depend_on_neither_its_place_nor_its_company(most):
    """Within a role, whatever the number of rows: programs of other widths, too.

    The interpreter's own products of a tile do depend on the width (XLA's on a CPU),
    so rows are whole numbers, and those exact; what is seen is how tiles add up.
    """
    case = make_case(R=40, inputs=1024)
    whole = np.random.default_rng(1).integers(-4, 5, case.x.shape)
    case = dataclasses.replace(case, x=whole.astype(ml_dtypes.bfloat16))

    def served(case):
        def call(interpret):
            return api.quantized_matmul(
                jnp.asarray(case.values), case.scales, None, jnp.asarray(case.x),
                out_dtype=jnp.float32, most_rows=most, implementation="mosaic_gpu",
                interpret=interpret,
            )  # fmt: skip

        return interpreted(call)

    together = served(case)
    for rows in ([7], [39, 7, 0], list(range(5, 22))):
        assert served(case.rows(rows)).tobytes() == together[rows].tobytes()


def test_the_two_forms_differ_so_that_a_role_must_have_one():
    case = make_case(R=2)
    assert (run(case, SUMS) != run(case, WEIGHTS)).any()


# One mistake each; not those that the interpreter misses: the kernel's file lists them
# for review.
BUGS = {
    "scales of the first tile": ("group + g])", "g])"),
    "scales of the first outputs": ("(outputs * t.consumers + part) * t.outputs", "0"),
    "a tile's groups share a scale": (">= g * sizes.width", ">= TILE"),
    "sums of a group with its neighbour's inputs": (
        "pl.ds(g * sizes.width, sizes.width)", "pl.ds(0, sizes.width)",
    ),
    "zero points are added": (
        "weight_OI - _along_inputs", "weight_OI + _along_inputs",
    ),
    "a split begins where the first does": (
        "(split * sizes.tiles + i) * TILE", "i * TILE",
    ),
    "the last split is dropped": ("in range(t.splits)]", "in range(t.splits - 1)]"),
    "the second chain is dropped": ("for i in range(t.chains - 1)", "for i in ()"),
    "rows of the first program": ("pl.ds(rows * t.rows, t.rows)\n\n", "pl.ds(0, 16)\n"),
    "the producer waits for no free slot": ("pl.when(i >= t.stages)(wait)", "pass"),
    "the consumer does not wait for a tile": (
        'plgpu.barrier_wait(refs["arrived"].at[slot])', "pass",
    ),
    "the first chain does not wait for the second": (
        'plgpu.barrier_wait(refs["summed"].at[part])', "pass",
    ),
}  # fmt: skip
# Where the mistake is in what only one form does.
ONLY = {
    "a tile's groups share a scale": WEIGHTS,
    "sums of a group with its neighbour's inputs": SUMS,
    "rows of the first program": WEIGHTS,
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    right, wrong = BUGS[bug]
    with open(mosaic_gpu.__file__) as file:
        text = file.read()
    assert text.count(right) == 1, right
    mutant = types.ModuleType("mutant")
    exec(compile(text.replace(right, wrong), "mutant", "exec"), mutant.__dict__)
    sizes = ONLY.get(bug, SUMS)
    case = make_case(group=64, has_zeros=True, R=20 if sizes is WEIGHTS else 9)
    try:
        out = run(case, sizes, module=mutant)
    except Exception:
        return  # a race, or a barrier that nobody waited for
    assert not relative_error(out, case.truth(sizes.on_sums)) < 1e-5
