"""Products with quantized weights: against numpy, row by row in bits, against bfloat16.

A timed call multiplies by several weights, together larger than the L2, so that each
comes from memory. int4 in groups is the Mosaic kernel; one scale per output is XLA's in
an engine, and the kernel's beside it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.pallas_kernels.quantized_matmul.api import quantized_matmul
from headrace.pallas_kernels.row_matmul.api import row_matmul
from headrace.scripts.selfcheck_device import (
    Setup,
    compile_program,
    error_text,
    require_device,
    time_chain,
)
from headrace.scripts.selfcheck_report import Part, share

# Largest absolute error over the largest absolute true value; and times XLA's.
LIMIT, TIMES_XLA = 1e-2, 2.0
# Type, inputs of a group (None: all), and which implementations.
SCHEMES = {
    "int4-g128": ("int4", 128, ("mosaic_gpu",)),
    "int8": ("int8", None, ("xla", "mosaic_gpu")),
    "fp8": ("float8_e4m3fn", None, ("xla", "mosaic_gpu")),
}
_BITS = {"int4": 4, "int8": 8, "float8_e4m3fn": 8}
# Of all weights of a call: beyond any L2.
_CALL_BYTES = 500_000_000


def goal(scheme: str, rows: int) -> float | None:
    """Times as fast as the product in bfloat16 that a product should be."""
    if scheme == "int4-g128":
        return {1: 2.5, 8: 2.5, 16: 2.5, 64: 2.0, 256: 1.0}.get(rows)
    return 1.8 if rows <= 64 else None


def roles(is_smoke: bool) -> dict[int, tuple[int, ...]]:
    """Most rows of a role -> the rows of its products that are tried."""
    return {8: (3, 8)} if is_smoke else {64: (1, 8, 16, 64), 256: (128, 256)}


def quantized(part: Part, setup: Setup) -> None:
    """Every scheme by every implementation.

    Raises:
      DeviceLost: the device answers no more.
    """
    seconds = _bfloat16_seconds(setup)
    for scheme, (_, _, implementations) in SCHEMES.items():
        for implementation in implementations:
            try:
                _scheme(part, setup, scheme, implementation, seconds)
            except Exception as error:  # noqa: BLE001 - the others still run
                name = f"{scheme} by {implementation}"
                part.check(name, False, error=error_text(error))
                require_device()


def product(implementation: str, most_rows: int, is_smoke: bool) -> Any:
    """A function of (values, scales, rows) that multiplies one way."""
    interpret = None
    if is_smoke and implementation == "mosaic_gpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams(detect_races=False)

    def multiply(values_OI: Any, scales_OS: Any, x_RI: Any) -> Any:
        return quantized_matmul(
            values_OI, scales_OS, None, x_RI, most_rows=most_rows,
            implementation=implementation, interpret=interpret,  # type: ignore[arg-type]
        )  # fmt: skip

    return multiply


def _scheme(
    part: Part,
    setup: Setup,
    scheme: str,
    implementation: str,
    bfloat16_s: dict[int, float],
) -> None:
    weights = _weights(setup, scheme)
    most = max(max(rows) for rows in roles(setup.is_smoke).values())
    x_RI = _rows(setup, most)
    truth_RO = _truth(weights[0], x_RI)
    for most_rows, counts in roles(setup.is_smoke).items():
        multiply = product(implementation, most_rows, setup.is_smoke)
        plain = product("xla", most_rows, setup.is_smoke)
        found = {}
        for rows in counts:
            args = (*weights[0], x_RI[:rows])
            out, xla = (
                np.asarray(compile_program(f, args)(*args), np.float32)
                for f in (multiply, plain)
            )
            errors = [_error(y, truth_RO[:rows]) for y in (out, xla)]
            found[rows] = out
            part.check(
                f"{scheme} by {implementation}, {rows} rows",
                errors[0] < LIMIT and errors[0] <= TIMES_XLA * errors[1],
                error=errors[0],
                plain_xla=errors[1],
            )
            _time(
                part,
                setup,
                f"{scheme} by {implementation}, {rows} rows",
                (multiply, weights, x_RI[:rows]),
                bfloat16_s[rows],
                goal=goal(scheme, rows),
            )
        if implementation == "mosaic_gpu":
            whole = found[counts[-1]]
            is_same = all(y.tobytes() == whole[:n].tobytes() for n, y in found.items())
            what = f"{scheme}: bits of a row among {counts} of {most_rows} rows"
            part.check(what, is_same)


def _time(
    part: Part,
    setup: Setup,
    name: str,
    call: tuple[Any, list[tuple[Any, ...]], Any],
    bfloat16_s: float,
    **facts: Any,
) -> None:
    multiply, weights, x_RI = call
    # Nobody looks at the times of a smoke test, so it need not interpret.
    if setup.is_smoke:
        part.measure(name, None, "s/s", **facts)
        return
    seconds = _seconds(setup, multiply, weights, x_RI)
    num_bytes = sum(_num_bytes(array) for array in weights[0])
    part.measure(
        name,
        bfloat16_s / seconds,
        "s/s",
        share=share(num_bytes / seconds, setup.roofs.copy_bytes_per_s),
        us=seconds * 1e6,
        bfloat16_us=bfloat16_s * 1e6,
        **facts,
    )


def _seconds(setup: Setup, multiply: Any, weights: list[Any], x_RI: Any) -> float:
    """Best time of one product, of a call that goes through all weights."""

    # Rows of their own for each, so that no two products can be made one.
    def products(weights: Any, rows: Any) -> Any:
        return [multiply(*w, x) for w, x in zip(weights, rows, strict=True)]

    rows = [x_RI + i for i in range(len(weights))]
    program = compile_program(products, (weights, rows))
    timing, _ = time_chain(lambda _: program(weights, rows), None, calls=10, repeats=7)
    return timing.best_s / len(weights)


def _bfloat16_seconds(setup: Setup) -> dict[int, float]:
    """Rows -> best time of a product with the weight in bfloat16."""
    counts = [rows for role in roles(setup.is_smoke).values() for rows in role]
    if setup.is_smoke:
        return dict.fromkeys(counts, 1.0)
    outputs, inputs = _shape(setup.is_smoke)
    keys = jax.random.split(
        jax.random.key(setup.seed), _num_weights(outputs, inputs, 16)
    )
    weights = [(_normal(key, (outputs, inputs)),) for key in keys]
    x_RI = _rows(setup, max(counts))
    return {rows: _seconds(setup, row_matmul, weights, x_RI[:rows]) for rows in counts}


def _shape(is_smoke: bool) -> tuple[int, int]:
    """Outputs and inputs: the down projection of an MLP of 8B."""
    return (128, 512) if is_smoke else (4096, 14336)


def _num_weights(outputs: int, inputs: int, bits: int) -> int:
    return max(2, -(-_CALL_BYTES * 8 // (outputs * inputs * bits)))


def _weights(setup: Setup, scheme: str) -> list[tuple[Any, Any]]:
    """Values and scales of several weights, made on the device."""
    dtype, group, _ = SCHEMES[scheme]
    outputs, inputs = _shape(setup.is_smoke)
    count = 1
    if not setup.is_smoke:
        count = _num_weights(outputs, inputs, _BITS[dtype])
    keys = jax.random.split(jax.random.key(setup.seed + 1), count)
    return [_weight(key, dtype, (outputs, inputs), group or inputs) for key in keys]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _weight(
    key: jax.Array, dtype: str, shape: tuple[int, int], group: int
) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key)
    limit = 8 if dtype == "int4" else 120
    values = jax.random.randint(keys[0], shape, -limit, limit, jnp.int8).astype(dtype)
    exponents = jax.random.uniform(
        keys[1], (shape[0], shape[1] // group), jnp.float32, -3.0, 1.0
    )
    return values, jnp.exp2(exponents)


@functools.partial(jax.jit, static_argnums=1)
def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _rows(setup: Setup, count: int) -> jax.Array:
    _, inputs = _shape(setup.is_smoke)
    return _normal(jax.random.key(setup.seed + 2), (count, inputs))


def _truth(weight: tuple[Any, Any], x_RI: Any) -> np.ndarray:
    """In float32 from the stored numbers."""
    values_OI, scales_OS = (np.asarray(array) for array in weight)
    grouped = values_OI.astype(np.float32).reshape(*scales_OS.shape, -1)
    weight_OI = (grouped * scales_OS[..., None]).reshape(values_OI.shape)
    return np.asarray(x_RI, np.float32) @ weight_OI.T


def _error(found: np.ndarray, truth: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def _num_bytes(array: Any) -> int:
    return array.size * _BITS.get(array.dtype.name, 8 * array.dtype.itemsize) // 8
