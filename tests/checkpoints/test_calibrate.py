"""Quantizing with data: nearer to the products of a text than rounding is."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoints.activation_scaling import awq, smooth
from headrace.checkpoints.calibrate import calibrated
from headrace.checkpoints.clipping import clipped
from headrace.checkpoints.gptq import gptq
from headrace.checkpoints.quantize import Rounding, quantize_array, round_checkpoint
from headrace.configs.quantization import parse_scheme
from headrace.layers.quantized import is_quantized
from headrace.layers.quantized_rows import quantize_rows

SKIP = ("embedding", "head")


def rows_of(rng, count, inputs):
    """Correlated inputs, some of them large, as those of a model are."""
    mixed = rng.standard_normal((count, inputs)) @ rng.standard_normal((inputs, inputs))
    return (mixed * np.exp(rng.standard_normal(inputs))).astype(np.float32)


def error(tensor, weight, rows):
    plain = np.asarray(tensor.dequantized(), np.float64)
    return np.linalg.norm(rows @ (plain - weight).T) / np.linalg.norm(rows @ weight.T)


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 192)).astype(np.float32)
    return weight, rows_of(rng, 600, 192), rows_of(np.random.default_rng(1), 200, 192)


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-z", "int4-g32", "int8", "fp8"])
def test_gptq_is_nearer_on_its_text(case, name):
    weight, rows, _ = case
    scheme = parse_scheme(name)
    found = gptq(weight, rows.T.astype(np.float64) @ rows, scheme)
    rounded = quantize_array(weight, scheme)
    assert found.shape == weight.shape and found.scales.shape == rounded.scales.shape
    assert found.values.dtype == rounded.values.dtype
    assert (found.zeros is None) == (rounded.zeros is None)
    assert error(found, weight, rows) < 0.8 * error(rounded, weight, rows)


def test_gptq_of_uncorrelated_inputs_is_rounding_with_clipped_scales(case):
    weight, _, _ = case
    scheme = parse_scheme("int4-g64")
    found = gptq(weight, np.eye(192), scheme)
    rounded = clipped(weight, np.ones(192), scheme)
    np.testing.assert_array_equal(found.scales, rounded.scales)
    np.testing.assert_array_equal(found.values, rounded.values)


@pytest.mark.parametrize("name", ["int4-g64", "int4-g32-z"])
def test_clipped_scales_leave_less_error_of_what_counts(case, name):
    weight, rows, _ = case
    weight[:, ::64] *= 4  # one large weight in every group
    scheme = parse_scheme(name)
    importance = np.square(rows).mean(0)
    found, rounded = clipped(weight, importance, scheme), quantize_array(weight, scheme)

    def errors(tensor):
        off = np.square(np.asarray(tensor.dequantized()) - weight) * importance
        return off.reshape(*tensor.scales.shape, -1).sum(-1)

    assert (errors(found) <= errors(rounded) * (1 + 1e-5)).all()
    assert errors(found).sum() < 0.97 * errors(rounded).sum()
    assert (found.scales <= rounded.scales).all()


def test_gptq_takes_inputs_that_never_occur(case):
    weight, rows, _ = case
    rows[:, 3] = 0
    found = gptq(weight, rows.T.astype(np.float64) @ rows, parse_scheme("int4-g64"))
    assert np.isfinite(np.asarray(found.dequantized())).all()


def test_awq_is_never_farther_on_its_text_and_keeps_the_product(case):
    weight, rows, _ = case
    scheme = parse_scheme("int4-g64")
    found = awq(weight, rows, scheme)
    rounded = quantize_array(weight, scheme)
    assert error(found, weight, rows) < 0.95 * error(rounded, weight, rows)
    assert found.factors.min() > 0 and not np.allclose(found.factors, 1)


def test_smoothing_helps_where_few_inputs_are_large(case):
    weight, _, _ = case
    rows = np.random.default_rng(2).standard_normal((300, 192)).astype(np.float32)
    rows[:, [5, 77]] *= 100
    scheme = parse_scheme("w8a8")

    def off(tensor):
        x = rows if tensor.factors is None else rows * np.asarray(tensor.factors)
        values, scales = quantize_rows(x, "int8")
        x = np.asarray(values, np.float32) * np.asarray(scales)
        plain = dataclasses.replace(tensor, factors=None).dequantized()
        return np.linalg.norm(x @ np.asarray(plain).T - rows @ weight.T)

    smoothed = smooth(weight, np.abs(rows).max(0), scheme)
    assert off(smoothed) < 0.5 * off(quantize_array(weight, scheme))


@pytest.mark.parametrize("method, name", [
    ("gptq", "int4-g32"), ("awq", "int4-g32-z"), ("smooth", "w8a8"),
])  # fmt: skip
def test_a_model_is_quantized_layer_by_layer(tiny_checkpoint, method, name):
    rng = np.random.default_rng(3)
    texts = [rng.integers(1, 512, 64) for _ in range(3)]
    rounding = Rounding(scheme=parse_scheme(name), skip=(*SKIP, "layer_0/down"))
    done = []
    found = calibrated(tiny_checkpoint, rounding, method, texts, done.append)
    assert done == [0, 1] and found.quantization == name
    rounded = round_checkpoint(tiny_checkpoint, rounding)
    assert found.identity not in (tiny_checkpoint.identity, rounded.identity)
    for layer in ("layer_0", "layer_1"):
        for key, ours in found.params[layer].items():
            theirs = rounded.params[layer][key]
            assert is_quantized(ours) == is_quantized(theirs), (layer, key)
            assert ours.shape == theirs.shape
    assert not is_quantized(found.params["layer_0"]["down"])
    assert found.params["embedding"] is tiny_checkpoint.params["embedding"]


@pytest.mark.parametrize("method, name, message", [
    ("gptq", "w8a8", "gptq does not go with scheme w8a8"),
    ("smooth", "int8", "smooth does not go with scheme int8"),
    ("best", "int8", "method must be one of"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(tiny_checkpoint, method, name, message):
    rounding = Rounding(scheme=parse_scheme(name), skip=SKIP)
    with pytest.raises(ValueError, match=message):
        calibrated(tiny_checkpoint, rounding, method, [np.ones(8, np.int32)])


def test_donated_layers_are_freed_one_by_one(tiny_checkpoint):
    """Beside the model there is one layer at most."""
    params = jax.tree.map(jnp.array, tiny_checkpoint.params)  # copies of our own
    own = dataclasses.replace(tiny_checkpoint, params=params)
    originals = {k: weakref.ref(params[k]["qkv"]) for k in ("layer_0", "layer_1")}
    del params
    seen = []
    found = calibrated(
        own,
        Rounding(scheme=parse_scheme("int4-g32"), skip=SKIP),
        "gptq",
        [np.arange(40)],
        tell=lambda _: seen.append([ref() is None for ref in originals.values()]),
        donate=True,
    )
    assert seen == [[True, False], [True, True]]
    assert is_quantized(found.params["layer_1"]["qkv"])
