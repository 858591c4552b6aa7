"""ModelConfig and EngineConfig refuse what is wrong, by name."""

import dataclasses
import json
import math

import pytest

from headrace.configs.schema import EngineConfig, ModelConfig, RopeScaling

MODEL = {
    "num_layers": 2,
    "model_dim": 64,
    "ffw_dim": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "context_len": 128,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context_len": 8192,
}


def test_unknown_key_is_refused_and_the_nearest_key_named():
    with pytest.raises(ValueError, match="'num_slot', did you mean 'num_slots'"):
        EngineConfig.from_mapping({"num_slot": 4})
    with pytest.raises(ValueError, match="no key 'zebra'; known keys"):
        ModelConfig.from_mapping({**MODEL, "zebra": 1})


def test_missing_keys_are_all_named():
    with pytest.raises(ValueError, match=r"\['head_dim', 'vocab_size'\]"):
        ModelConfig.from_mapping(
            {k: v for k, v in MODEL.items() if k not in ("head_dim", "vocab_size")}
        )


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_layers", 0),
        ("num_layers", True),
        ("num_layers", 2.0),
        ("num_layers", "2"),
        ("num_heads", 3),
        ("head_dim", 15),
        ("family", "gpt2"),
        ("rope_base", math.nan),
        ("norm_eps", -1e-5),
        ("norm_eps", 2.0),
        ("stop_ids", (256,)),
        ("stop_ids", (-1,)),
        ("stop_ids", 2),
        ("bos_id", 256),
        ("tie_embeddings", "false"),
        ("tie_embeddings", 1),
    ],
)
def test_model_value_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        ModelConfig.from_mapping({**MODEL, key: value})


@pytest.mark.parametrize(
    "key, value",
    [
        ("page_size", 24),
        ("page_size", True),
        ("num_pages", 1),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.01),
        ("memory_fraction", math.inf),
        ("num_slots", 0),
        ("num_slots", 4097),
        ("decode_batch_sizes", ()),
        ("decode_batch_sizes", (8, 8)),
        ("decode_batch_sizes", (16, 8)),
        ("decode_batch_sizes", (0, 8)),
        ("decode_batch_sizes", 8),
        ("prefill_shapes", ()),
        ("prefill_shapes", (8, 16)),
        ("prefill_shapes", ((1, 64), (1, 32))),
        ("prefill_shapes", ((1, 4),)),
        ("prefill_shapes", ((0, 32),)),
        ("prefill_shapes", ((1, 32, 1),)),
        ("prefill_shapes", 32),
        ("max_context_len", 1),
        ("numerics", "exact"),
        ("policy", "lifo"),
        ("max_logprobs", -2),
        ("max_bad_words", 0),
        ("scoring", 1),
        ("max_stop_ids", 0),
        ("param_dtype", "float16"),
        ("kv_dtype", "int4"),
        ("prefill_calls_per_decode", 0),
        ("compile_threads", 0),
    ],
)
def test_engine_value_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        EngineConfig(**{key: value})


def test_last_decode_batch_size_must_be_num_slots():
    with pytest.raises(ValueError, match="must equal num_slots 32"):
        EngineConfig(num_slots=32, decode_batch_sizes=(8, 16))


@pytest.mark.parametrize(
    "key, value",
    [
        ("factor", 0.5),
        ("low_freq_factor", 0.0),
        ("high_freq_factor", 1.0),
        ("high_freq_factor", "4"),
        ("original_context_len", 0),
    ],
)
def test_rope_scaling_out_of_range_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        RopeScaling.from_mapping({**SCALING, key: value})


def test_rope_scaling_mapping_becomes_a_checked_dataclass():
    config = ModelConfig.from_mapping({**MODEL, "rope_scaling": SCALING})
    assert config.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=8192
    )
    with pytest.raises(ValueError, match="did you mean 'factor'"):
        ModelConfig.from_mapping({**MODEL, "rope_scaling": {**SCALING, "facto": 2}})


def test_json_round_trip_gives_an_equal_hashable_config():
    config = ModelConfig.from_mapping(
        {**MODEL, "rope_scaling": SCALING, "stop_ids": (1, 2)}
    )
    again = ModelConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
    assert again == config
    assert hash(again) == hash(config)


def test_lists_of_a_parsed_file_become_tuples():
    config = EngineConfig.from_mapping(
        {"decode_batch_sizes": [8, 16], "prefill_shapes": [[1, 32], [4, 128]]}
    )
    assert config.decode_batch_sizes == (8, 16)
    assert config.prefill_shapes == ((1, 32), (4, 128))


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().page_size = 16
    with pytest.raises(TypeError):
        EngineConfig(128)
    with pytest.raises(ValueError, match="page_size"):
        dataclasses.replace(EngineConfig(), page_size=100)


def test_group_size_is_query_heads_per_kv_head():
    assert ModelConfig.from_mapping({**MODEL, "num_heads": 6}).group_size == 3


def test_presets_set_the_knobs_of_their_use():
    assert EngineConfig.preset("chat").prefill_calls_per_decode == 1
    assert EngineConfig.preset("batch").prefill_calls_per_decode > 1
    with pytest.raises(ValueError, match="preset must be one of"):
        EngineConfig.preset("fast")
