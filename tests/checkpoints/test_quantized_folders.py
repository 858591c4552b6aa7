"""Published quantized formats: every weight equals its reference, bit for bit."""

import jax
import numpy as np
import pytest
import quantized_folders as qf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_cases import AWQ, CASES, GPTQ, args, ct, write_case

from headrace.checkpoints.int4_bytes import weight_shape
from headrace.checkpoints.linear_format import LayerTensors
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.orbax_store import save_store
from headrace.checkpoints.place_quantized import place_quantized
from headrace.checkpoints.quantize import Rounding
from headrace.checkpoints.quantized_source import parse_quantization
from headrace.configs.quantization import parse_scheme
from headrace.configs.schema import EngineConfig
from headrace.engine import weight_sizes
from headrace.layers.quantized import QuantizedTensor, is_quantized, tree_bytes


def plain_of(weight):
    """A host array of what a loaded weight stands for."""
    if isinstance(weight, QuantizedTensor):
        return np.asarray(weight.dequantized())
    return np.asarray(weight)


def by_source(params):
    """Hugging Face name -> [out, in] of a loaded tree, head by head."""
    found = {
        "model.embed_tokens.weight": plain_of(params["embedding"]),
        "model.norm.weight": plain_of(params["final_norm"]),
        "lm_head.weight": plain_of(params["head"]),
    }
    for layer in range(qf.L):
        ours, prefix = params[f"layer_{layer}"], f"model.layers.{layer}"
        if isinstance(ours["qkv"], tuple):
            q, k, v = map(plain_of, ours["qkv"])
        else:
            qkv = plain_of(ours["qkv"])
            q, k, v = qkv[:, :-2], qkv[:, -2], qkv[:, -1]
        gate, up = ours["gate_up"], None
        if isinstance(gate, tuple):
            gate, up = map(plain_of, gate)
        else:
            gate, up = plain_of(gate)
        for name, weight in (
            ("self_attn.q_proj", np.concatenate([h for kv in q for h in kv])),
            ("self_attn.k_proj", np.concatenate(list(k))),
            ("self_attn.v_proj", np.concatenate(list(v))),
            ("self_attn.o_proj", plain_of(ours["out"])),
            ("mlp.gate_proj", gate),
            ("mlp.up_proj", up),
            ("mlp.down_proj", plain_of(ours["down"])),
            ("input_layernorm", plain_of(ours["attention_norm"])),
            ("post_attention_layernorm", plain_of(ours["mlp_norm"])),
        ):
            found[f"{prefix}.{name}.weight"] = weight
    return found


def assert_equal(params, weights):
    found = by_source(params)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_their_reference_and_say_what_they_are(name, tmp_path):
    weights = write_case(tmp_path / "hf", name)
    checkpoint = load_checkpoint(tmp_path / "hf")
    assert_equal(checkpoint.params, weights)
    assert checkpoint.quantization == CASES[name][3]
    leaves = jax.tree.leaves(checkpoint.params, is_leaf=is_quantized)
    assert sum(map(is_quantized, leaves)) >= 4 * qf.L - 2
    assert {"embedding", "head"} <= set(checkpoint.quantization_skip)
    _assert_planned(checkpoint, "float32")


@pytest.mark.parametrize("name", ["awq_plain", "gptq_dynamic", "ct_mixed"])
def test_a_plan_is_not_below_what_mixed_weights_take(name, tmp_path):
    write_case(tmp_path / "hf", name)
    checkpoint = load_checkpoint(tmp_path / "hf", dtype="bfloat16")
    _assert_planned(checkpoint, "bfloat16")
    layer = checkpoint.params["layer_0"]
    mixed = {
        "awq_plain": {"layer_0/qkv", "layer_1/qkv", "layer_1/gate_up", "layer_1/down"},
        "gptq_dynamic": {f"layer_{i}/{n}" for i in (0, 1) for n in ("qkv", "down")},
        "ct_mixed": {f"layer_{i}/{n}" for i in (0, 1) for n in ("qkv", "out")},
    }[name]
    assert set(checkpoint.quantization_skip) == mixed | {"embedding", "head"}
    assert layer["attention_norm"].dtype == "bfloat16"


def _assert_planned(checkpoint, dtype):
    """As the engine counts weights; orders and scales of inputs are no part of that."""
    config = EngineConfig(
        param_dtype=dtype,
        quantization=checkpoint.quantization,
        quantization_skip=checkpoint.quantization_skip,
    )
    planned = weight_sizes.weights_bytes(checkpoint.config, config)
    leaves = jax.tree.leaves(checkpoint.params, is_leaf=is_quantized)
    quantized = filter(is_quantized, leaves)
    extra = tree_bytes([(w.order, w.activation_scale) for w in quantized])
    assert planned >= tree_bytes(checkpoint.params) - extra


@pytest.mark.parametrize(
    "name",
    ["awq", "gptq_order", "gptq_dynamic", "ct_mixed", "fp8_static", "fp8_block"],
)
def test_a_store_of_them_gives_back_every_bit(name, tmp_path):
    weights = write_case(tmp_path / "hf", name)
    checkpoint = load_checkpoint(tmp_path / "hf")
    save_store(tmp_path / "store", checkpoint)
    found = load_checkpoint(tmp_path / "store")
    assert_equal(found.params, weights)
    assert found.quantization == checkpoint.quantization
    assert found.quantization_skip == checkpoint.quantization_skip
    ours, theirs = (jax.tree.flatten(c.params) for c in (found, checkpoint))
    assert ours[1] == theirs[1]  # tuples and schemes as well
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_parts_are_joined_where_they_are_alike_and_only_there(tmp_path):
    def kinds(name):
        write_case(tmp_path / name, name)
        layer = load_checkpoint(tmp_path / name).params["layer_0"]
        return [
            [is_quantized(p) for p in w] if isinstance(w, tuple) else is_quantized(w)
            for w in (layer["qkv"], layer["gate_up"], layer["down"])
        ]

    assert kinds("awq") == [True, True, True]
    assert kinds("awq_plain") == [[True, False, True], True, True]
    assert kinds("gptq_order") == [[True] * 3, [True] * 2, True]
    assert kinds("gptq_dynamic") == [[True] * 3, True, False]
    assert kinds("fp8") == [True, True, True]
    assert kinds("fp8_static") == [[True] * 3, [True] * 2, True]


def test_one_order_for_all_three_is_joined(tmp_path):
    """What GPTQ writes when q, k and v are quantized together: one g_idx."""
    groups = np.random.default_rng(9).permutation(np.arange(qf.D) // 32)

    def make(rng, shape, layer):
        tensors, weight = qf.packed(rng, shape)
        if shape[1] != qf.D:
            tensors["weight_g_idx"] = (np.arange(shape[1]) // 32).astype(np.int32)
            return tensors, weight
        scales = tensors["weight_scale"].astype(np.float32)
        fields = np.empty(shape, np.int64)
        for i in range(shape[1]):
            word = tensors["weight_packed"][:, i // 8].view(np.uint32)
            fields[:, i] = (word >> np.uint32(4 * (i % 8))) & 15
        tensors["weight_g_idx"] = groups.astype(np.int32)
        return tensors, qf.dequantized(
            fields - 8, np.zeros(scales.shape, int), scales, groups
        )

    config = CASES["ct_int4_order"][0]
    weights = {**config["config_groups"]["group_0"]["weights"], "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    config = config | {"config_groups": {"group_0": group}}
    reference = qf.write_folder(tmp_path / "hf", config, make)
    params = load_checkpoint(tmp_path / "hf").params
    assert_equal(params, reference)
    layer = params["layer_1"]
    assert is_quantized(layer["qkv"]) and layer["qkv"].order is not None
    assert is_quantized(layer["gate_up"]) and layer["down"].order is None


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["awq", "gptq", "ct"]), st.integers(0, 2**32), st.data())
def test_any_shape_equals_its_reference(method, seed, data):
    O, I = (8 * data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 9)))  # noqa: E741
    size = data.draw(st.sampled_from([None, 8, 32]))
    options = {"group_size": size}
    group = {"group_size": size or -1}
    if method == "awq":
        make, config = qf.awq, AWQ | group
    else:
        bits = data.draw(st.sampled_from([4, 8]))
        sym, order = data.draw(st.booleans()), bool(size) and data.draw(st.booleans())
        options |= {"bits": bits, "sym": sym, "act_order": order}
        make, config = qf.packed, args(bits, symmetric=sym) | group
        config |= {"strategy": "group" if size else "channel"}
        config = ct("pack-quantized", config | {"actorder": order})
        if method == "gptq":
            make, config = qf.gptq, GPTQ | group | {"bits": bits, "sym": sym}
            config |= {"desc_act": order}
    tensors, weight = make(np.random.default_rng(seed), (O, I), **options)
    layer = "model.layers.0.mlp.up_proj"
    stored = {f"{layer}.{suffix}": array for suffix, array in tensors.items()}
    found = parse_quantization(config)(layer).read(
        LayerTensors(layer, (O, I), set(tensors), stored.__getitem__)
    )
    assert weight_shape(found) == (O, I)
    placed = place_quantized(found, None)
    np.testing.assert_array_equal(np.asarray(placed.dequantized()), weight)


def test_what_comes_quantized_is_not_rounded(tmp_path):
    weights = write_case(tmp_path / "hf", "awq_plain")
    same = Rounding(scheme=parse_scheme("int4-g32-z"))
    assert_equal(load_checkpoint(tmp_path / "hf", rounding=same).params, weights)
    other = Rounding(scheme=parse_scheme("int8"))
    with pytest.raises(ValueError, match="quantized already, as int4-g32-z"):
        load_checkpoint(tmp_path / "hf", rounding=other)


def test_a_mesh_of_one_places_parts_and_all(tmp_path):
    mesh = jax.make_mesh((1,), ("model",))
    P = jax.sharding.PartitionSpec
    specs = {"qkv": P("model"), "gate_up": P(None, "model"), "out": P(None, "model"),
             "down": P(None, "model")}  # fmt: skip

    def shardings(path):
        return jax.sharding.NamedSharding(mesh, specs.get(path[-1], P()))

    weights = write_case(tmp_path / "hf", "fp8_static")
    params = load_checkpoint(tmp_path / "hf", shardings=shardings).params
    assert_equal(params, weights)
    q, k, _ = params["layer_0"]["qkv"]
    assert q.values.sharding.spec == P("model", None, None, None)
    assert k.values.sharding.spec == P("model", None, None)
    save_store(tmp_path / "store", load_checkpoint(tmp_path / "hf"))
    found = load_checkpoint(tmp_path / "store", shardings=shardings).params
    assert_equal(found, weights)
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
    assert all(a.sharding == b.sharding for a, b in leaves)
    gate, _ = params["layer_0"]["gate_up"]
    assert gate.values.sharding.spec == P("model", None)
    assert gate.scales.sharding.spec == P("model", None)
