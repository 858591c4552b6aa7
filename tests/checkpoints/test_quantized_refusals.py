"""What quantized folders say that is not computed: refused, with the field's name."""

import copy

import jax
import ml_dtypes
import numpy as np
import pytest
import quantized_folders as qf
from quantized_cases import AWQ, CASES, FP8, GPTQ, args, ct, inputs, write_case
from safetensors.numpy import save_file

from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quantized_source import parse_quantization
from headrace.checkpoints.safetensors_source import SafetensorsSource

LAYER = "model.layers.1.mlp.up_proj"
ORDERED = args(actorder="group")
FLOAT = args(8, "float", "channel")
BLOCK = args(8, "float", "block", block_structure=[128, 128])


def _group(**changes):
    config = copy.deepcopy(ct("pack-quantized", args()))
    config["config_groups"]["group_0"] |= changes
    return config


@pytest.mark.parametrize("config, message", [
    ([], "quantization_config must be a JSON object"),
    ({}, r"quant_method None is not supported; known: \['awq', 'gptq', "),
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
    (AWQ | {"version": "gemv"}, r"version 'gemv' is not supported; known: \['gemm'\]"),
    (AWQ | {"bits": 3}, r"bits 3 is not supported; known: \[4\]"),
    (AWQ | {"bits": 4.0}, "bits 4.0 is not supported"),
    (AWQ | {"zero_point": False}, "zero_point False is not supported"),
    (AWQ | {"zero_point": 1}, "zero_point 1 is not supported"),
    (AWQ | {"group_size": 0}, "group_size must be -1 or at least 2, got 0"),
    (AWQ | {"modules_to_not_convert": "x"}, "modules_to_not_convert must be a list"),
    (AWQ | {"new_thing": 1}, r"the field 'new_thing' \(here 1\) is not known; known:"),
    (GPTQ | {"bits": 2}, r"bits 2 is not supported; known: \[4, 8\]"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
    (GPTQ | {"format": "gptq_v2"}, "format 'gptq_v2' is not supported"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format True is not supported"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported"),
    (GPTQ | {"sym": "yes"}, "sym 'yes' is not supported"),
    (GPTQ | {"dynamic": {"(": {}}}, r"dynamic: '\(' is no pattern"),
    (GPTQ | {"dynamic": {"x": {"bits": 3}}}, r"dynamic\['x'\]: bits 3 is not"),
    (GPTQ | {"dynamic": {"x": {"adapter": 3}}}, "the field 'adapter'"),
    (GPTQ | {"modules_in_block_to_quantize": [[1]]}, "must hold names"),
    (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
    (FP8 | {"activation_scheme": "none"}, "activation_scheme 'none' is not supported"),
    ({"quant_method": "fp8"}, "activation_scheme None is not supported"),
    (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    (FP8 | {"weight_block_size": 128}, "weight_block_size must be two sizes"),
    (FP8 | {"weight_block_size": [128, 1]}, "must span two inputs or more"),
    (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"},
     "activation_scheme 'static' is not supported with weight_block_size"),
    (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme .* not supported"),
    (FP8 | {"rotate": True}, "the field 'rotate'"),
    (ct("dense", args()), "format 'dense' is not supported"),
    (ct("marlin-24", args()), "format 'marlin-24' is not supported"),
    (ct("mixed-precision", args()), "group_0: format 'mixed-pre"),
    (ct("pack-quantized", args(), quantization_status="frozen"), "_status 'frozen'"),
    (ct("pack-quantized", args(), sparsity_config={"format": "sparse-bitmask"}),
     "sparsity_config 'sparse-bitmask' is not supported"),
    (ct("pack-quantized", args(), transform_config={"a": 1}), "transform_config"),
    (ct("pack-quantized", args(), kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (ct("pack-quantized", args(), novel=1), "the field 'novel'"),
    (ct("pack-quantized", args(3)), "group_0.weights: num_bits 3 is not supported"),
    (ct("pack-quantized", args(8, "float")), "type 'float' is not supported"),
    (ct("float-quantized", args(8)), "type 'int' is not supported"),
    (ct("float-quantized", args(4, "float")), "num_bits 4 is not supported"),
    (ct("pack-quantized", args(strategy="tensor")), "strategy 'tensor' is not"),
    (ct("pack-quantized", args(group_size=None)), "strategy 'group' needs a group"),
    (ct("pack-quantized", args(strategy="channel") | {"group_size": 64}),
     "group_size 64 is not supported with strategy 'channel'"),
    (ct("pack-quantized", args(dynamic=True)), "dynamic True is not supported"),
    (ct("pack-quantized", args(actorder="odd")), "actorder 'odd' is not supported"),
    (ct("pack-quantized", args(codebook=1)), "the field 'codebook'"),
    (ct("int-quantized", args(8, actorder="group")), "is not supported with actorder"),
    (ct("pack-quantized", args(), inputs()), "input_activations: activations 'int8'"),
    (ct("int-quantized", args(8), inputs()), "input_activations: activations 'int8'"),
    (ct("int-quantized", args(8, strategy="channel"), inputs("float")),
     "input_activations: type 'float' is not supported"),
    (ct("int-quantized", args(8, strategy="channel"), inputs(num_bits=4)),
     "input_activations: num_bits 4"),
    (ct("int-quantized", args(8, strategy="channel"), inputs(symmetric=False)),
     "input_activations: symmetric False"),
    (ct("int-quantized", args(8, strategy="channel"), inputs(strategy="tensor")),
     "input_activations: strategy 'tensor'"),
    (ct("int-quantized", args(8, strategy="channel"), inputs(dynamic="local")),
     "input_activations: dynamic 'local'"),
    (ct("float-quantized", BLOCK, inputs("float", dynamic=False)), "dynamic False"),
    (ct("float-quantized", FLOAT | {"symmetric": False}), "fp8 has no zero points"),
    (_group(output_activations={"num_bits": 8}), "output_activations"),
    (_group(weights=None), "group_0.weights must be a JSON object, got None"),
    (_group(targets="Linear"), "targets must be a list of texts"),
    (_group(format="dense"), "group_0: format 'dense' is not supported"),
    (_group(surprise=1), "group_0: the field 'surprise'"),
])  # fmt: skip
def test_config_that_is_not_computed_is_refused_by_its_field(config, message):
    with pytest.raises(ValueError, match=message):
        parse_quantization(config)


def test_fields_that_only_inform_are_ignored():
    more = {"damp_percent": 0.1, "meta": {"quantizer": ["gptqmodel:2"]}, "backend": "x"}
    assert parse_quantization(GPTQ | more)(LAYER) == parse_quantization(GPTQ)(LAYER)
    assert parse_quantization(AWQ | {"do_fuse": True})(LAYER) is not None
    assert parse_quantization(FP8 | {"scale_fmt": "ue8m0"})(LAYER) is not None


@pytest.mark.parametrize("config, layer, is_quantized", [
    (AWQ, LAYER, True),
    (AWQ, "lm_head", False),
    (AWQ | {"modules_to_not_convert": ["up_proj"]}, LAYER, False),
    (AWQ | {"modules_to_not_convert": ["layers.1"]}, LAYER, False),
    (AWQ | {"modules_to_not_convert": ["layers.1"]}, LAYER.replace("1", "10"), True),
    (AWQ | {"modules_to_not_convert": ["up"]}, LAYER, True),
    (GPTQ, "lm_head", False),
    (GPTQ | {"lm_head": True}, "lm_head", True),
    (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, LAYER, True),
    (GPTQ | {"modules_in_block_to_quantize": [["mlp.down_proj"]]}, LAYER, False),
    (GPTQ | {"dynamic": {"-:.*up": {}, "+:.*": {"bits": 8}}}, LAYER, False),
    (FP8, "lm_head", False),
    (ct("pack-quantized", args()), "lm_head", False),
    (ct("pack-quantized", args(), ignore=[]), "lm_head", True),
    (ct("pack-quantized", args(), ignore=["re:.*mlp.*"]), LAYER, False),
    (ct("pack-quantized", args(), ignore=["mlp"]), LAYER, True),
    (_group(targets=["re:.*down_proj"]), LAYER, False),
    (_group(targets=[LAYER]), LAYER, True),
])  # fmt: skip
def test_which_layers_are_quantized(config, layer, is_quantized):
    assert (parse_quantization(config)(layer) is not None) == is_quantized


def test_the_closest_target_counts():
    config = _group()
    exact = {"targets": [LAYER], "weights": args(8)}
    pattern = {"targets": ["re:.*up_proj"], "weights": args(group_size=64)}
    config["config_groups"] |= {"group_1": pattern, "group_2": exact}
    format_of = parse_quantization(config)
    assert format_of(LAYER).scheme.name == "int8-g32"
    assert format_of(LAYER.replace("1", "0")).scheme.name == "int4-g64"
    assert format_of("model.layers.0.mlp.down_proj").scheme.name == "int4-g32"


def _edit(folder, change):
    source = SafetensorsSource(folder)
    tensors = {name: source.stored(name).copy() for name in source.names()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _drop(suffix):
    return lambda tensors: tensors.pop(f"{LAYER}.{suffix}")


def _set(suffix, function):
    def change(tensors):
        name = f"{LAYER}.{suffix}"
        tensors[name] = np.ascontiguousarray(function(tensors.get(name)))

    return change


def _first(value):
    """Puts a value into the first place."""

    def change(array):
        array = array.copy()
        array.reshape(-1)[0] = value
        return array

    return change


NAN8 = np.array(127, np.uint8).view(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("name, change, message", [
    ("awq", _drop("qzeros"), f"lacks {LAYER}.qzeros, which quantization_config"),
    ("awq", _set("qweight", lambda a: a[:-1]), rf"{LAYER}.qweight has shape \(127, 32"),
    ("awq", _set("scales", lambda a: a[:, :-8]), f"{LAYER}.scales has shape"),
    ("awq", _set("qzeros", lambda a: a.astype(np.int64)), "stored as int64; known"),
    ("awq", _set("scales", _first(np.inf)), f"{LAYER}.scales is not finite"),
    ("awq", _set("bias", lambda a: np.zeros(qf.F, np.float16)), f"know: {LAYER}.bias"),
    ("awq", _set("g_idx", lambda a: np.zeros(qf.D, np.int32)), f"know: {LAYER}.g_idx"),
    ("awq_plain", _set("qweight", lambda a: np.zeros(1, np.int32)), "up_proj.qweight"),
    ("gptq", _set("qzeros", lambda a: a + 1), f"{LAYER}.qzeros has other zero points"),
    ("gptq_zeros", _set("qzeros", lambda a: a * 0 - 1), "15 with checkpoint_format"),
    ("gptq_order", _drop("g_idx"), f"lacks {LAYER}.g_idx, and desc_act is true"),
    ("gptq_order", _set("g_idx", _first(9)), "does not put 32 inputs into each group"),
    ("ct_int4", _drop("weight_scale"), f"lacks {LAYER}.weight_scale"),
    ("ct_int4", _set("weight_shape", _first(9)), r"weight_shape says \[9, 128\]"),
    ("ct_int4_order", _drop("weight_g_idx"), f"lacks {LAYER}.weight_g_idx"),
    ("ct_int8", _drop("weight_zero_point"), f"lacks {LAYER}.weight_zero_point"),
    ("ct_w8a8", _set("weight_zero_point", lambda a: np.ones((qf.F, 1), np.int8)),
     "has zero points, and its scheme in quantization_config is symmetric"),
    ("ct_w8a8_static", _drop("input_scale"), f"lacks {LAYER}.input_scale"),
    ("ct_w8a8_static", _set("input_scale", _first(0)), "input_scale is not positive"),
    ("ct_int8_int4", _set("weight", _first(9)), "do not fit num_bits 4"),
    ("fp8", _set("weight", _first(NAN8)), f"{LAYER}.weight is not finite"),
    ("fp8", _set("weight", lambda a: a.astype(np.int8)), "stored as int8; known"),
    ("fp8", _set("weight_scale", lambda a: np.ones(2, np.float32)), "has shape"),
    ("fp8_block", _set("weight_scale_inv", lambda a: a[:1]), "weight_scale_inv has sh"),
    ("fp8_block", _set("input_scale", lambda a: np.ones(1, np.float32)), "know: .*inp"),
])  # fmt: skip
def test_odd_tensors_are_refused_by_name(name, change, message, tmp_path):
    write_case(tmp_path / "hf", name)
    _edit(tmp_path / "hf", change)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "hf")


def test_a_layer_that_is_plain_and_should_not_be_is_named(tmp_path):
    config, make, _, _ = CASES["awq"]
    qf.write_folder(tmp_path / "hf", config, make, plain=("1.mlp.up_proj",))
    with pytest.raises(ValueError, match=f"{LAYER}.weight is not quantized; .*qweight"):
        load_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize("name, changes, message", [
    ("awq", {"group_size": 96}, "q_proj: group size 96 .* 128 inputs"),
    ("gptq", {"group_size": 96}, "q_proj: group size 96 .* 128 inputs"),
    ("gptq_order", {"desc_act": False}, "g_idx is in act-order, and desc_act"),
    ("fp8_block", {"weight_block_size": [128, 96]}, "q_proj: group size 96"),
    ("awq", {"group_size": 64}, r"qzeros has shape \(4, 16\).* needs \(2, 16\)"),
])  # fmt: skip
def test_config_that_the_tensors_do_not_bear_out_is_refused(
    name, changes, message, tmp_path
):
    write_case(tmp_path / "hf", name, **changes)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "hf")


def test_a_quantized_head_that_is_tied_is_refused(tmp_path):
    config, make, _, _ = CASES["ct_int8"]
    config = config | {"ignore": []}
    tensors, _ = make(np.random.default_rng(0), (qf.V, qf.D), "lm_head")
    qf.write_folder(tmp_path / "hf", config, make, tie_word_embeddings=True)

    def change(stored):
        del stored["lm_head.weight"]
        stored |= {f"lm_head.{suffix}": array for suffix, array in tensors.items()}

    _edit(tmp_path / "hf", change)
    with pytest.raises(ValueError, match="lm_head is quantized, and tie_word"):
        load_checkpoint(tmp_path / "hf")


def test_act_order_on_a_layer_that_is_split_over_its_inputs_is_refused(tmp_path):
    mesh = jax.sharding.AbstractMesh((2,), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")

    def shardings(path):
        if path[-1] != "down":
            return None
        return jax.sharding.NamedSharding(mesh, spec)

    write_case(tmp_path / "hf", "gptq_order")
    message = "layer_0/down: .* with act-order of inputs cannot be cut into 2"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "hf", shardings=shardings)


def test_a_truncated_file_is_refused(tmp_path):
    write_case(tmp_path / "hf", "awq")
    path = tmp_path / "hf" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="model.safetensors .* truncated or damaged"):
        load_checkpoint(tmp_path / "hf")
