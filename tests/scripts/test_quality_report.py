"""The quality report: its numbers by hand, and a run on two layers."""

import json

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoints.quantize import quantize_array
from headrace.configs.quantization import parse_scheme
from headrace.layers import linear
from headrace.scripts import quality_report
from headrace.scripts.quality_compare import scheme_of
from headrace.scripts.quality_metrics import (
    Agreement,
    log_softmax,
    relative_error,
    windows,
)
from headrace.scripts.quality_outliers import outlier_product


@pytest.fixture(autouse=True)
def parsed_flags():
    with flagsaver.flagsaver():
        flags.FLAGS(["x"])
        yield


def test_numbers_by_hand():
    base = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))
    found = Agreement()
    found.add(base + 3, other - 5, np.array([0, 1]))  # softmax knows no offset
    facts = found.facts()
    assert facts["base_perplexity"] == pytest.approx((0.5 * 0.8) ** -0.5)
    assert facts["perplexity"] == pytest.approx((0.25 * 0.8) ** -0.5)
    assert facts["perplexity_increase"] == pytest.approx(2**0.5 - 1)
    kl = 0.5 * np.log(2) - 0.25 * np.log(2)
    assert facts["kl_mean"] == pytest.approx(kl / 2)
    assert facts["kl_p99"] == pytest.approx(kl * 0.99)
    assert (facts["top1_agreement"], facts["num_tokens"]) == (0.5, 2)


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 80))
def test_windows_are_whole_and_follow_each_other(size, length, most):
    texts = [list(range(size // 2)), list(range(size // 2, size))]
    count = min(most, size - 1) // length
    if count < 1:
        with pytest.raises(ValueError, match="a window needs"):
            windows(texts, length, most)
        return
    found = windows(texts, length, most)
    assert [w.tolist() for w in found] == [
        list(range(i * length, (i + 1) * length + 1)) for i in range(count)
    ]


def test_log_softmax_survives_large_scores():
    found = log_softmax(np.array([[1e30, 1e30]], np.float32))
    np.testing.assert_allclose(found, np.log(0.5))


def test_relative_error_is_that_of_norms():
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 3.0])) == 0.2
    assert relative_error(np.zeros(2), np.zeros(2)) == 0


def test_a_run_tells_schemes_apart(capsys, tmp_path):
    picture = tmp_path / "a.png"
    with flagsaver.flagsaver(
        config="tiny", schemes=["int8", "rtn-g32", "kv-int8"], num_tokens=100,
        window_tokens=50, plot=str(picture),
    ):  # fmt: skip
        assert quality_report.main(["x"]) == 0
    out = capsys.readouterr().out.splitlines()
    eight, four, pages = map(json.loads, out[-3:])
    assert [line["scheme"] for line in (eight, four, pages)] == [
        "int8", "rtn-g32", "kv-int8",
    ]  # fmt: skip
    assert {line["num_tokens"] for line in (eight, four, pages)} == {100}
    assert 0 < eight["kl_mean"] < four["kl_mean"]
    assert four["bytes"] < eight["bytes"] < pages["bytes"] == eight["base_bytes"]
    assert pages["kv_bytes_per_token"] * 3 < eight["kv_bytes_per_token"]
    assert eight["layer_error"].keys() == four["layer_error"].keys() != set()
    assert "layer_1/down" in eight["layer_error"] and not pages["layer_error"]
    for name, error in eight["layer_error"].items():
        assert 0 < error < four["layer_error"][name] < 0.2
    assert 0 < pages["kl_mean"]
    assert picture.stat().st_size > 1000


def test_outliers_are_what_is_left_in_float():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    rows = rng.standard_normal((40, 64)).astype(np.float32)
    rows[3, 5], rows[7, 20] = 200.0, -90.0
    rounded = quantize_array(weight, parse_scheme("w8a8"))
    stored = np.asarray(rounded.dequantized())

    def off(product):
        return np.linalg.norm(np.asarray(product) - rows @ stored.T)

    split, plain = outlier_product(rounded, rows), linear.matmul(rounded, rows)
    assert off(split) < 0.2 * off(plain)
    with linear.replacing(outlier_product):
        np.testing.assert_array_equal(linear.matmul(rounded, rows), split)
    rows[:, [5, 20]] = 0
    same = outlier_product(rounded, rows), linear.matmul(rounded, rows)
    np.testing.assert_allclose(*same, rtol=1e-6, atol=1e-5)


def test_names_say_method_scheme_and_pages():
    for name, scheme, method, pages in (
        ("int8", "int8", None, "float32"),
        ("w8a8", "w8a8", None, "float32"),
        ("fp8-w8a8", "fp8-w8a8", None, "float32"),
        ("llm-int8", "w8a8", None, "float32"),
        ("w8a8-smooth", "w8a8", "smooth", "float32"),
        ("rtn-g64", "int4-g64", None, "float32"),
        ("awq-g32-z", "int4-g32-z", "awq", "float32"),
        ("gptq-g128", "int4-g128", "gptq", "float32"),
        ("kv-int8", None, None, "int8"),
    ):
        wanted = scheme_of(name)
        found = wanted.rounding and wanted.rounding.scheme.name
        assert (found, wanted.method, wanted.kv_dtype) == (scheme, method, pages)
        assert wanted.splits_outliers == (name == "llm-int8")
    for name in ("w8a8-", "awq", "gptq-", "kv-int4", "smooth"):
        with pytest.raises(ValueError):
            scheme_of(name)


@pytest.mark.parametrize("settings, message", [
    ({"schemes": ["int8", "int3"]}, "quantization must be such as"),
    ({"schemes": ["rtn-g7"]}, "does not divide"),
    ({"num_tokens": 10}, "num_tokens must be at least 50"),
    ({"text": "missing.txt"}, "needs a model with a tokenizer"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(capsys, settings, message):
    settings = {"config": "tiny", "window_tokens": 50} | settings
    with flagsaver.flagsaver(**settings):
        assert quality_report.main(["x"]) == 1
    assert message in capsys.readouterr().err
    assert flags.FLAGS.window_tokens == 1024
