"""The one place that multiplies by a weight, for weights in any form."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.checkpoints.quantize import quantize_array
from headrace.configs.quantization import parse_scheme
from headrace.layers import linear
from headrace.layers.quantized_rows import quantize_rows

RNG = np.random.default_rng(5)
VALID = jnp.array([3, 1], jnp.int32)


def quantized(shape, name="int8-g16"):
    weight = RNG.standard_normal(shape, np.float32)
    return jax.tree.map(jnp.asarray, quantize_array(weight, parse_scheme(name)))


def rows(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32))


@pytest.mark.parametrize("name", ["int8", "int4-g16", "int4-g16-z", "fp8"])
def test_a_product_is_that_of_the_dequantized_weight(name):
    weight, x = quantized((24, 32), name), rows(2, 3, 32)
    out = linear.matmul(weight, x, VALID)
    truth = np.asarray(x) @ np.asarray(weight.dequantized()).T
    np.testing.assert_allclose(out[0], truth[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[1, :1], truth[1, :1], rtol=1e-4, atol=1e-5)


def test_order_and_factors_meet_the_rows():
    weight, x = quantized((24, 32)), rows(7, 32)
    weight = dataclasses.replace(
        weight,
        order=jnp.asarray(RNG.permutation(32)),
        factors=jnp.asarray(RNG.uniform(0.5, 2, 32).astype(np.float32)),
    )
    truth = np.asarray(x) @ np.asarray(weight.dequantized()).T
    np.testing.assert_allclose(linear.matmul(weight, x), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["array", "quantized", "parts"])
def test_packed_weights_may_be_parts(form):
    K, G, H, D, F = 2, 3, 4, 32, 6
    q, k, v = quantized((K, G, H, D)), quantized((K, H, D)), quantized((K, H, D))
    gate, up = quantized((F, D)), quantized((F, D), "int4-g16")
    x = rows(2, 3, D)

    def times(weight):
        flat = np.asarray(weight.dequantized()).reshape(-1, D)
        return (np.asarray(x) @ flat.T).reshape(2, 3, *weight.shape[:-1])

    truth = [times(part) for part in (q, k, v, gate, up)]
    if form == "parts":
        qkv, gate_up = (q, k, v), (gate, up)
    else:
        arrays = [np.asarray(one.dequantized()) for one in (q, k, v, gate, up)]
        qkv = np.concatenate([arrays[0], arrays[1][:, None], arrays[2][:, None]], 1)
        gate_up = np.stack(arrays[3:])
        if form == "quantized":
            scheme = parse_scheme("int8-g16")
            qkv, gate_up = (quantize_array(w, scheme) for w in (qkv, gate_up))
        qkv, gate_up = jax.tree.map(jnp.asarray, (qkv, gate_up))
    out = *linear.packed_qkv(qkv, x, VALID), *linear.packed_gate_up(gate_up, x, VALID)
    loose = dict(rtol=1e-4, atol=1e-5) if form != "quantized" else dict(atol=0.3)
    for ours, theirs in zip(out, truth, strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours[0], theirs[0], **loose)


def test_rows_of_a_quantized_table():
    table, tokens = quantized((10, 32), "int4-g16-z"), jnp.array([[1, 9], [0, 1]])
    found = linear.embed(table, tokens, "float32")
    np.testing.assert_array_equal(found, table.dequantized()[tokens])
    plain = table.dequantized()
    np.testing.assert_array_equal(linear.embed(plain, tokens, "float32"), found)


@pytest.mark.parametrize(
    "kind, bound", [("int8", 0.5 / 127), ("float8_e4m3fn", 1 / 16)]
)
def test_a_row_is_quantized_by_itself(kind, bound):
    x = rows(5, 64) * jnp.array([[1e-6], [1.0], [1e6], [3.0], [0.0]])
    values, scales = quantize_rows(x, kind)
    back = values.astype(jnp.float32) * scales
    most = np.abs(np.asarray(x)).max(1, keepdims=True)
    assert (np.abs(np.asarray(back - x)) <= most * bound * 1.001).all()
    alone, scale = quantize_rows(x[1:2], kind)
    assert (alone == values[1:2]).all() and scale == scales[1]


def test_a_fixed_scale_cuts_off():
    x = jnp.array([[1.0, -3.0, 1000.0]])
    values, scales = quantize_rows(x, "int8", jnp.float32(0.5))
    assert values.tolist() == [[2, -6, 127]] and scales.tolist() == [[0.5]]
