"""Rows times a weight, in plain XLA and in C++, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels import native
from headrace.pallas_kernels.row_matmul.api import cpu_identity, row_matmul

needs_compiler = pytest.mark.skipif(
    native.compiler() is None, reason="there is no C++ compiler here"
)


def _case(rows, inputs, outputs, seed=0):
    rng = np.random.default_rng(seed)
    shape = (outputs, inputs), (rows, inputs)
    return tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shape)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 140), st.integers(1, 200), st.integers(1, 120), st.integers(0, 999)
)
def test_equals_float64_at_any_size(rows, inputs, outputs, seed):
    w, x = _case(rows, inputs, outputs, seed)
    truth = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert (
        np.abs(np.asarray(row_matmul(w, x)) - truth).max() < 1e-5 * inputs**0.5 + 1e-5
    )


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 140),
    st.integers(1, 200),
    st.integers(1, 120),
    st.data(),
)
def test_a_row_has_its_bits_in_any_company(rows, inputs, outputs, data):
    w, x = _case(rows, inputs, outputs)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    together = np.asarray(row_matmul(w, x))[begin:end]
    assert np.array_equal(together, np.asarray(row_matmul(w, x[begin:end])))


@pytest.mark.parametrize("valid", [(128, 128), (70, 1), (64, 0), (3, 65)])
def test_rows_that_count_keep_their_bits_and_the_others_are_finite(valid):
    w, x = _case(256, 100, 50)
    every = np.asarray(row_matmul(w, x)).reshape(2, 128, 50)
    some = np.asarray(row_matmul(w, x, jnp.array(valid))).reshape(2, 128, 50)
    for group, count in enumerate(valid):
        assert np.array_equal(every[group, :count], some[group, :count])
    assert np.isfinite(some).all()


@needs_compiler
def test_not_a_number_stays_in_its_row():
    w, x = _case(20, 100, 50)
    clean = np.asarray(row_matmul(w, x))
    out = np.asarray(row_matmul(w, x.at[3, 7].set(jnp.nan)))
    assert np.isnan(out[3]).all()
    assert np.array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


def test_other_types_go_to_plain_xla():
    assert cpu_identity("bfloat16") == ""
    w, x = _case(3, 64, 32)
    narrow = w.astype(jnp.bfloat16)
    out = np.asarray(row_matmul(narrow, x))
    truth = np.asarray(x, np.float64) @ np.asarray(narrow, np.float64).T
    assert out.dtype == np.float32
    assert np.abs(out - truth).max() < 1e-4


def test_sizes_that_do_not_fit_are_refused():
    w, x = _case(3, 64, 32)
    with pytest.raises(ValueError, match=r"rows \(3, 60\) do not fit .* \(32, 64\)"):
        row_matmul(w, x[:, :60])
    with pytest.raises(ValueError, match="3 rows do not make 2 equal groups"):
        row_matmul(w, x, jnp.array([1, 1]))


def test_sums_are_rounded_once_to_the_type_that_is_asked_for():
    w, x = (array.astype(jnp.bfloat16) for array in _case(3, 64, 32))
    wide = row_matmul(w, x, out_dtype=jnp.float32)
    truth = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert wide.dtype == jnp.float32
    assert np.abs(np.asarray(wide) - truth).max() < 1e-4
    narrow = row_matmul(w, x)
    assert narrow.dtype == jnp.bfloat16
    assert np.abs(np.asarray(narrow, np.float64) - truth).max() > 1e-3
    assert row_matmul(*_case(3, 64, 32), out_dtype=jnp.bfloat16).dtype == jnp.bfloat16
