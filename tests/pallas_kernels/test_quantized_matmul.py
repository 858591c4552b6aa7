"""Products with quantized weights: against float64, and bit for bit against float32."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels.quantized_matmul import api, reference, xla
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


@needs_cpp
def test_padding_costs_nothing_and_changes_nothing():
    rng = np.random.default_rng(3)
    values, scales, _ = make_weight(rng, "int4", 50, 128, 4)
    x = rng.standard_normal((2 * 64, 128), np.float32)
    x[3:64] = np.nan  # of the first group three rows count
    valid = jnp.array([3, 64], jnp.int32)
    out = api.quantized_matmul(jnp.asarray(values), scales, None, x, valid)
    alone = api.quantized_matmul(jnp.asarray(values), scales, None, x[:3])
    np.testing.assert_array_equal(out[:3], alone)
    assert np.isfinite(out[64:]).all() and np.isfinite(out[32:64]).all()


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
