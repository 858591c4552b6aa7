"""Rounding to nearest: as near as a scheme allows, on its way in, and never twice."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoints.quantize import (
    Rounding,
    is_skipped,
    place_quantized,
    placer_of,
    quantize_array,
    quantized_shapes,
    round_checkpoint,
)
from headrace.configs.quantization import parse_scheme
from headrace.layers.models import param_shapes
from headrace.layers.quantized import QuantizedTensor, is_quantized, tree_bytes
from headrace.pallas_kernels.quantized_matmul.reference import dequantize

NAMES = ["int8", "fp8", "w8a8", "int8-g16", "int4-g16", "int4-g16-z", "int8-g32-z"]


def _flat(tensor):
    zeros = None if tensor.zeros is None else np.asarray(tensor.zeros)
    return dequantize(np.asarray(tensor.values), np.asarray(tensor.scales), zeros)


@settings(deadline=None)
@given(
    st.sampled_from(NAMES),
    st.integers(0, 2**32),
    st.floats(-30, 30),
    st.floats(0, 5),
)
def test_no_value_that_could_be_stored_is_nearer(name, seed, exponent, shift):
    scheme = parse_scheme(name)
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((5, 64)).astype(np.float32) + np.float32(shift)
    weight *= np.float32(2.0**exponent)
    tensor = quantize_array(weight, scheme)
    groups = tensor.scales.shape[1]
    off = np.abs(_flat(tensor) - weight).reshape(5, groups, -1)
    if scheme.values == "float8_e4m3fn":
        # 3 bits of mantissa, and what is subnormal by a fixed step.
        step = np.abs(weight).reshape(off.shape) / 16
        bound = np.maximum(step, tensor.scales[..., None] * 2.0**-10)
    else:
        bound = np.broadcast_to(tensor.scales[..., None] / 2, off.shape)
        if scheme.has_zeros:  # rounded too, which can cut off half a step at an end
            bound = bound * 2
    assert (off <= bound * 1.0001).all()


def test_a_group_of_zeros_and_leading_axes_keep_their_shape():
    weight = np.zeros((2, 3, 4, 32), np.float32)
    weight[1, 2, 3, 20] = 5.0
    tensor = quantize_array(weight, parse_scheme("int4-g16"))
    assert tensor.shape == weight.shape and tensor.scales.shape == (2, 3, 4, 2)
    np.testing.assert_allclose(np.asarray(tensor.dequantized()), weight, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad):
    place = placer_of("float32", None, Rounding(scheme=parse_scheme("int8")))
    with pytest.raises(ValueError, match="layer_0/out: .* must be finite"):
        place(("layer_0", "out"), np.full((2, 2), bad, np.float32))


def test_a_group_that_does_not_divide_is_refused_by_name():
    place = placer_of("float32", None, Rounding(scheme=parse_scheme("int4-g128")))
    with pytest.raises(ValueError, match="layer_0/out: group size 128 .* 96 inputs"):
        place(("layer_0", "out"), np.ones((2, 96), np.float32))


def test_norms_and_what_is_named_stay():
    skip = ("embedding", "layer_0/*", "*/down")
    for path, ndim, wanted in (
        (("final_norm",), 1, True),
        (("embedding",), 2, True),
        (("layer_0", "qkv"), 4, True),
        (("layer_1", "qkv"), 4, False),
        (("layer_1", "down"), 2, True),
        (("head",), 2, False),
    ):
        assert is_skipped(path, ndim, skip) == wanted, path


@pytest.mark.parametrize("name", NAMES)
def test_on_its_way_in_or_afterwards_it_is_the_same(tiny_checkpoint, name):
    rounding = Rounding(scheme=parse_scheme(name), skip=("embedding",))
    place = placer_of("float32", None, rounding)
    after = round_checkpoint(tiny_checkpoint, rounding)
    assert after.quantization == name and after.identity != tiny_checkpoint.identity
    qkv = tiny_checkpoint.params["layer_1"]["qkv"]
    placed = place(("layer_1", "qkv"), np.asarray(qkv))
    pair = placed, after.params["layer_1"]["qkv"]
    for ours, theirs in zip(*map(jax.tree.leaves, pair), strict=True):
        assert ours.dtype == theirs.dtype and (ours == theirs).all()
    plain = after.params["embedding"], after.params["layer_0"]["mlp_norm"]
    assert not any(map(is_quantized, plain))
    assert tree_bytes(after.params) < tree_bytes(tiny_checkpoint.params)


def test_nothing_is_quantized_twice(tiny_checkpoint):
    eight, four = (Rounding(scheme=parse_scheme(n)) for n in ("int8", "int4-g16"))
    once = round_checkpoint(tiny_checkpoint, eight)
    assert round_checkpoint(once, eight) is once
    assert round_checkpoint(once, None) is once
    with pytest.raises(ValueError, match="already, as int8; .* got 'int4-g16'"):
        round_checkpoint(once, four)


def test_identity_tells_scheme_and_skipped_apart():
    eight = Rounding(scheme=parse_scheme("int8"))
    others = [
        dataclasses.replace(eight, skip=("head",)),
        Rounding(scheme=parse_scheme("w8a8")),
    ]
    assert len({r.identity("x") for r in (eight, *others)} | {"x"}) == 4


def test_a_mesh_that_would_cut_a_group_is_refused():
    mesh = jax.sharding.AbstractMesh((3,), ("model",))
    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(None, "model")
    )
    weight = np.ones((4, 96), np.float32)
    tensor = quantize_array(weight, parse_scheme("int4-g48"))
    with pytest.raises(ValueError, match="2 groups of inputs cannot be cut into 3"):
        place_quantized(tensor, sharding)
    ordered = dataclasses.replace(
        quantize_array(weight, parse_scheme("int4-g32")), order=np.arange(96)
    )
    with pytest.raises(ValueError, match="cannot be cut"):
        place_quantized(ordered, sharding)


def test_the_weight_it_stands_for_has_order_and_factors_in_it():
    values = np.array([[1, 2, 3, 4]], np.int8)
    tensor = QuantizedTensor(
        values=jax.numpy.asarray(values),
        scales=jax.numpy.ones((1, 1)),
        order=jax.numpy.array([2, 0, 3, 1]),
        factors=jax.numpy.array([1.0, 10.0, 100.0, 1000.0]),
        scheme=parse_scheme("int8"),
    )
    # Input 2 meets the first value, and is multiplied by its own factor.
    assert tensor.dequantized().tolist() == [[2.0, 40.0, 100.0, 3000.0]]


def test_int4_is_counted_as_half_a_byte():
    tree = {"a": np.zeros((4, 6), ml_dtypes.int4), "b": np.zeros(3, np.float32)}
    assert tree_bytes(tree) == 12 + 12


@pytest.mark.parametrize("name", [*NAMES, None])
def test_shapes_are_those_of_the_rounded_weights(tiny_checkpoint, name):
    skip = ("embedding", "head")
    rounding = name and Rounding(scheme=parse_scheme(name), skip=skip)
    shapes = quantized_shapes(param_shapes(tiny_checkpoint.config), "float32", rounding)
    rounded = round_checkpoint(tiny_checkpoint, rounding).params
    assert jax.tree.structure(shapes) == jax.tree.structure(rounded)
    for ours, theirs in zip(*map(jax.tree.leaves, (shapes, rounded)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
