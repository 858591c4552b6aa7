"""Products with quantized weights: against float64, and bit for bit against float32."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels import gpu_target
from headrace.pallas_kernels.quantized_matmul import api, reference, tuning, xla
from headrace.pallas_kernels.row_matmul.api import row_matmul

TYPES = {
    "int8": np.int8, "int4": ml_dtypes.int4, "float8_e4m3fn": ml_dtypes.float8_e4m3fn
}  # fmt: skip
needs_cpp = pytest.mark.skipif(not api.cpu_identity(), reason="no C++ compiler here")


def make_weight(rng, kind, outputs, inputs, groups, has_zeros=False):
    """All stored values that a type has, scales of many sizes."""
    if kind == "float8_e4m3fn":
        bits = rng.integers(0, 256, (outputs, inputs), np.uint8)
        bits[bits & 127 == 127] = 0  # NaN
        values = bits.view(ml_dtypes.float8_e4m3fn)
    else:
        low, high = (-8, 8) if kind == "int4" else (-128, 128)
        values = rng.integers(low, high, (outputs, inputs)).astype(TYPES[kind])
    scales = np.exp2(rng.uniform(-9, 2, (outputs, groups))).astype(np.float32)
    zeros = rng.integers(-8, 9, scales.shape).astype(np.int8) if has_zeros else None
    return values, scales, zeros


@st.composite
def cases(draw):
    kind = draw(st.sampled_from(list(TYPES)))
    groups = draw(st.integers(1, 4))
    inputs = groups * draw(st.integers(1, 40)) * 2
    outputs, rows = draw(st.integers(1, 130)), draw(st.integers(1, 70))
    has_zeros = kind != "float8_e4m3fn" and draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = make_weight(rng, kind, outputs, inputs, groups, has_zeros)
    return weight, rng.standard_normal((rows, inputs), np.float32)


def error(out, truth):
    return np.abs(np.asarray(out, np.float64) - truth).max() / np.abs(truth).max()


@needs_cpp
@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_cpu_kernel_has_the_bits_of_the_dequantized_weight(case):
    (values, scales, zeros), x = case
    out = api.quantized_matmul(jnp.asarray(values), scales, zeros, x)
    weight = reference.dequantize(values, scales, zeros)
    np.testing.assert_array_equal(out, row_matmul(jnp.asarray(weight), x))


@settings(max_examples=40, deadline=None)
@given(cases())
def test_plain_xla_is_right(case):
    (values, scales, zeros), x = case
    args = (jnp.asarray(values), scales, zeros, x)
    out = xla.quantized_matmul_xla(*args, jnp.float32)
    truth = reference.quantized_matmul_reference(values, scales, zeros, x)
    assert error(out, truth) < 1e-5


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(
    "kind, groups", [("int8", 1), ("int4", 8), ("float8_e4m3fn", 1)]
)
def test_plain_xla_in_bfloat16_is_as_good_as_a_bfloat16_product(kind, groups, rows):
    rng = np.random.default_rng(1)
    values, scales, _ = make_weight(rng, kind, 96, 512, groups)
    x = rng.standard_normal((rows, 512)).astype(ml_dtypes.bfloat16)
    truth = reference.quantized_matmul_reference(values, scales, None, x)
    out = xla.quantized_matmul_xla(
        jnp.asarray(values), scales, None, jnp.asarray(x), jnp.bfloat16
    )
    assert out.dtype == jnp.bfloat16 and error(out, truth) < 1e-2


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("x_dtype, limit", [(np.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_the_form_that_xla_fuses_on_gpus_is_right(x_dtype, limit, has_zeros):
    rng = np.random.default_rng(4)
    weight = make_weight(rng, "int4", 96, 512, 8, has_zeros)
    x = rng.standard_normal((9, 512)).astype(x_dtype)
    truth = reference.quantized_matmul_reference(*weight, x.astype(np.float32))
    out = xla.fused_matmul_xla(*map(_array, weight), jnp.asarray(x))
    assert out.dtype == jnp.float32 and error(out, truth) < limit


def _array(x):
    return None if x is None else jnp.asarray(x)


def shapes(outputs=256, inputs=512, groups=4, rows=8, kind="int4", x="bfloat16"):
    """Arguments of the API, without zero points."""
    spec = jax.ShapeDtypeStruct
    return (
        spec((outputs, inputs), kind), spec((outputs, groups), jnp.float32),
        spec((rows, inputs), x),
    )  # fmt: skip


def lowered(args, capability, **options):
    """The product as it is lowered for a GPU that is not there."""

    def multiply(values, scales, x):
        return api.quantized_matmul(values, scales, None, x, **options)

    with gpu_target.compiling_for(capability):
        traced = jax.jit(multiply).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_grouped_weights_are_the_kernels_where_wgmma_is(caplog):
    api._say_once.cache_clear()
    assert "mosaic_gpu" in lowered(shapes(), (9, 0))
    assert not caplog.messages
    assert "mosaic_gpu" not in lowered(shapes(groups=1, kind="int8"), (9, 0))
    assert not caplog.messages  # one scale per output is XLA's by choice
    for _ in range(2):
        assert "mosaic_gpu" not in lowered(shapes(), (10, 0))
    (said,) = caplog.messages
    assert "plain XLA" in said and "(10, 0), not (9, 0)" in said


@pytest.mark.parametrize("change, reason", [
    ({"x": "float32"}, "rows of float32"),
    ({"groups": 32}, "groups of 16"),
    ({"inputs": 576, "groups": 9}, "a weight of 256 x 576"),
    ({"outputs": 192}, "a weight of 192 x 512"),
])  # fmt: skip
def test_what_the_kernel_does_not_serve_is_said_or_refused(change, reason, caplog):
    api._say_once.cache_clear()
    args = shapes(**change)
    assert "mosaic_gpu" not in lowered(args, (9, 0))
    assert reason in caplog.messages[0]
    with pytest.raises(NotImplementedError, match=reason):
        lowered(args, (9, 0), implementation="mosaic_gpu")


def test_an_implementation_can_be_forced():
    rng = np.random.default_rng(5)
    values, scales, _ = make_weight(rng, "int4", 40, 64, 4)
    x = rng.standard_normal((3, 64), np.float32)
    truth = reference.quantized_matmul_reference(values, scales, None, x)
    args = jnp.asarray(values), scales, None, x
    forced = ["xla", *(["cpu"] if api.cpu_identity() else [])]
    for name in forced:
        assert error(api.quantized_matmul(*args, implementation=name), truth) < 1e-5
    with pytest.raises(ValueError, match="implementation must be one of"):
        api.quantized_matmul(*args, implementation="other")
    assert "mosaic_gpu" in lowered(
        shapes(groups=1, kind="int8"), (9, 0), implementation="mosaic_gpu"
    )


@settings(max_examples=200, deadline=None)
@given(
    outputs=st.integers(1, 250), inputs=st.integers(1, 120),
    most=st.integers(1, 4096), data=st.data(), bits=st.sampled_from([4, 8]),
)  # fmt: skip
def test_what_bits_depend_on_follows_from_weight_and_role(
    outputs, inputs, most, data, bits
):
    rows = data.draw(st.integers(1, most))
    wanted, found = (
        tuning.tuning(128 * outputs, 128 * inputs, rows=r, most_rows=most, bits=bits)
        for r in (most, rows)
    )
    for name in ("on_sums", "splits", "chains"):
        assert getattr(wanted, name) == getattr(found, name)
    # Scales multiply sums up to 64 rows, and weights from 128 on.
    assert wanted.on_sums == (most <= 64)
    for sizes in (wanted, found):
        assert sizes.stages >= 2 and sizes.stages % sizes.chains == 0
        assert 128 * outputs % sizes.program_outputs == 0
        assert inputs % sizes.splits == 0


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_rows_and_weights_that_are_quantized_both(kind):
    rng = np.random.default_rng(2)
    values, scales, _ = make_weight(rng, kind, 40, 256, 1)
    x, x_scales, _ = make_weight(rng, kind, 9, 256, 1)
    out = api.quantized_rows_matmul(
        jnp.asarray(values), scales, jnp.asarray(x), x_scales, jnp.float32
    )
    sums = x.astype(np.float64) @ values.astype(np.float64).T
    truth = sums * (x_scales.astype(np.float64) * scales.T)
    assert error(out, truth) < 1e-6


def fp8_products(**options):
    """Products of fp8 rows, traced."""
    values, rows = (jax.ShapeDtypeStruct((n, 256), jnp.float8_e4m3fn) for n in (40, 9))
    scales, row_scales = (jax.ShapeDtypeStruct((n, 1), jnp.float32) for n in (40, 9))
    return jax.eval_shape(
        lambda *args: api.quantized_rows_matmul(*args, jnp.float32, **options),
        values, scales, rows, row_scales,
    )  # fmt: skip


def test_fp8_rows_are_widened_with_a_line_or_refused_where_there_are_none(caplog):
    api._say_widened.cache_clear()
    with gpu_target.compiling_for((8, 9)):
        fp8_products(native=True)
    assert not caplog.messages
    with gpu_target.compiling_for((8, 0)):
        fp8_products()
        fp8_products()
        with pytest.raises(NotImplementedError, match=r"8\.0: 8\.9 or later"):
            fp8_products(native=True)
    (message,) = caplog.messages
    assert "widened" in message and "8.0" in message
    fp8_products()
    with pytest.raises(NotImplementedError, match="on a CPU"):
        fp8_products(native=True)


@needs_cpp
def test_padding_costs_nothing_and_changes_nothing():
    rng = np.random.default_rng(3)
    values, scales, _ = make_weight(rng, "int4", 50, 128, 4)
    x = rng.standard_normal((2 * 128, 128), np.float32)
    x[3:128] = np.nan  # of the first group three rows count
    valid = jnp.array([3, 128], jnp.int32)
    out = api.quantized_matmul(jnp.asarray(values), scales, None, x, valid)
    alone = api.quantized_matmul(jnp.asarray(values), scales, None, x[:3])
    np.testing.assert_array_equal(out[:3], alone)
    # Rows are taken by 64 at most.
    assert np.isfinite(out[128:]).all() and np.isfinite(out[64:128]).all()


def test_int4_takes_half_a_byte():
    values = jnp.zeros((64, 128), jnp.int4)
    scales, x = jnp.ones((64, 2)), jnp.ones((1, 128))
    compiled = (
        jax.jit(lambda v, s, x: api.quantized_matmul(v, s, None, x))
        .lower(values, scales, x)
        .compile()
    )
    wanted = 64 * 128 // 2 + 4 * (64 * 2 + 128)
    assert compiled.memory_analysis().argument_size_in_bytes == wanted


@pytest.mark.parametrize("change, message", [
    ({"values_OI": jnp.zeros((4, 6))}, "values must be one of"),
    ({"x_RI": jnp.zeros((2, 8))}, "do not fit"),
    ({"scales_OS": jnp.zeros((4, 4))}, "do not fit"),
    ({"scales_OS": jnp.zeros((3, 1))}, "do not fit"),
    ({"zeros_OS": jnp.zeros((4, 2), jnp.int8)}, "must be like scales"),
    ({"num_valid_B": jnp.zeros(3, jnp.int32)}, "equal groups"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, message):
    args = {
        "values_OI": jnp.zeros((4, 6), jnp.int8), "scales_OS": jnp.zeros((4, 1)),
        "zeros_OS": None, "x_RI": jnp.zeros((2, 6)),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        api.quantized_matmul(**(args | change))
