"""The quantized folders that are tested: name -> config, how layers are made, plain."""

import functools

import quantized_folders as qf


def _make(function, **options):
    made = functools.partial(function, **options)
    return lambda rng, shape, layer: made(rng, shape)


def ct(form, weights, inputs=None, **more):
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
             "output_activations": None}  # fmt: skip
    base = {"quant_method": "compressed-tensors", "format": form,
            "quantization_status": "compressed", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "version": "0.9",
            "global_compression_ratio": 1.5}  # fmt: skip
    return base | more


def args(bits=4, kind="int", strategy="group", group_size=32, symmetric=True, **more):
    """Its QuantizationArgs of weights."""
    if strategy != "group":
        group_size = None
    said = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False,
            "group_size": group_size, "symmetric": symmetric, "observer": "mse",
            "observer_kwargs": {}, "actorder": None}  # fmt: skip
    return said | more


def inputs(kind="int", dynamic=True, **more):
    """Its QuantizationArgs of activations."""
    strategy = "token" if dynamic else "tensor"
    said = {"num_bits": 8, "type": kind, "strategy": strategy, "dynamic": dynamic}
    return said | {"symmetric": True, "group_size": None} | more


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
       "zero_point": True, "modules_to_not_convert": None}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True,
        "desc_act": False, "damp_percent": 0.01,
        "checkpoint_format": "gptq"}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PER_LAYER = {"-:.*down_proj": {}, "+:.*k_proj": {"bits": 8, "group_size": 64}}


def _gptq_dynamic(rng, shape, layer):
    options = {"bits": 8, "group_size": 64} if "k_proj" in layer else {}
    return qf.gptq(rng, shape, **options)


def _mixed_ct(rng, shape, layer):
    if "self_attn" in layer:
        return qf.packed(rng, shape, bits=8, group_size=None)
    return qf.packed(rng, shape, sym=False)


_MIXED = ct("pack-quantized", args())
_MIXED["config_groups"] = {
    "group_0": {"targets": ["Linear"], "weights": args(symmetric=False)},
    "group_1": {
        "targets": ["re:.*self_attn.*"],
        "weights": args(8, strategy="channel"),
    },
}

# Name -> quantization_config, make, plain layers, scheme of most weights.
CASES = {
    "awq": (AWQ, _make(qf.awq), (), "int4-g32-z"),
    "awq_one_group": (AWQ | {"group_size": -1}, _make(qf.awq, group_size=None), (),
                      "int4-g128-z"),
    "awq_plain": (AWQ | {"modules_to_not_convert": ["k_proj", "layers.1.mlp"]},
                  _make(qf.awq), ("k_proj", "layers.1.mlp"), "int4-g32-z"),
    "gptq": (GPTQ, _make(qf.gptq), (), "int4-g32"),
    "gptq_zeros": (GPTQ | {"sym": False}, _make(qf.gptq, sym=False), (), "int4-g32-z"),
    "gptq_v2": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
                _make(qf.gptq, sym=False, offset=0), (), "int4-g32-z"),
    "gptq_8": (GPTQ | {"bits": 8, "sym": False, "group_size": -1},
               _make(qf.gptq, bits=8, sym=False, group_size=None), (), "int8-z"),
    "gptq_order": (GPTQ | {"desc_act": True}, _make(qf.gptq, act_order=True), (),
                   "int4-g32"),
    "gptq_8_order": (GPTQ | {"desc_act": True, "bits": 8, "sym": False},
                     _make(qf.gptq, bits=8, sym=False, act_order=True), (),
                     "int8-g32-z"),
    "gptq_dynamic": (GPTQ | {"dynamic": PER_LAYER}, _gptq_dynamic, ("down_proj",),
                     "int4-g32"),
    "ct_int4": (ct("pack-quantized", args()), _make(qf.packed), (), "int4-g32"),
    "ct_int4_zeros": (ct("pack-quantized", args(symmetric=False)),
                      _make(qf.packed, sym=False), (), "int4-g32-z"),
    "ct_int4_channel": (ct("pack-quantized", args(strategy="channel")),
                        _make(qf.packed, group_size=None), (), "int4-g128"),
    "ct_int4_order": (ct("pack-quantized", args(actorder="group", symmetric=False)),
                      _make(qf.packed, sym=False, act_order=True), (), "int4-g32-z"),
    "ct_int8_packed": (ct("pack-quantized", args(8)), _make(qf.packed, bits=8), (),
                       "int8-g32"),
    "ct_mixed": (_MIXED, _mixed_ct, (), "int4-g32-z"),
    "ct_int8": (ct("int-quantized", args(8, strategy="channel", symmetric=False)),
                _make(qf.stored, sym=False), (), "int8-z"),
    "ct_int8_int4": (ct("int-quantized", args(4, strategy="channel")),
                     _make(qf.stored, bits=4), (), "int4-g128"),
    "ct_int8_plain": (ct("naive-quantized", args(8, strategy="tensor"),
                         ignore=["lm_head", "re:.*layers.0.*v_proj"]),
                      _make(qf.stored, strategy="tensor"), ("layers.0.self_attn.v",),
                      "int8"),
    "ct_w8a8": (ct("int-quantized", args(8, strategy="channel"), inputs()),
                _make(qf.stored), (), "w8a8"),
    "ct_w8a8_static": (ct("int-quantized", args(8, strategy="channel"),
                          inputs(dynamic=False)),
                       _make(qf.stored, static=True), (), "w8a8"),
    "ct_fp8": (ct("float-quantized", args(8, "float", "channel")),
               _make(qf.stored, kind="fp8"), (), "fp8"),
    "ct_fp8_w8a8": (ct("float-quantized", args(8, "float", "tensor"), inputs("float")),
                    _make(qf.stored, kind="fp8", strategy="tensor"), (), "fp8-w8a8"),
    "ct_fp8_block": (ct("float-quantized",
                        args(8, "float", "block", block_structure=[128, 128]),
                        inputs("float", strategy="group", group_size=128)),
                     _make(qf.stored, kind="fp8", strategy="block"), (), "fp8-g128"),
    "fp8": (FP8, _make(qf.stored, kind="fp8", strategy="tensor"), (), "fp8-w8a8"),
    "fp8_static": (FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
                   _make(qf.stored, kind="fp8", strategy="tensor", static=True), (),
                   "fp8-w8a8"),
    "fp8_block": (FP8 | {"weight_block_size": [128, 128], "fmt": "e4m3",
                         "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]},
                  _make(qf.stored, kind="fp8", strategy="block",
                        suffix="weight_scale_inv"), ("0.mlp.up_proj",), "fp8-g128"),
}  # fmt: skip


def write_case(folder, name, **changes):
    """Writes a case's folder; returns name -> weight."""
    config, make, plain, _ = CASES[name]
    return qf.write_folder(folder, config | changes, make, plain)
