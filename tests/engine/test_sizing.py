"""Sizes that follow from the model and the free memory."""

import dataclasses

import pytest

from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import EngineConfig, load_config, parse_config
from headrace.engine.sizing import DeviceFacts, num_params, page_bytes, resolve

SMOL = parse_config(load_config("smollm2_135m"))[0]
LLAMA_8B = parse_config(load_config("llama3_1_8b"))[0]
CPU = DeviceFacts(platform="cpu", free_bytes=16 * 2**30)
H200 = DeviceFacts(platform="gpu", free_bytes=140 * 10**9)


def test_published_parameter_counts_come_out():
    assert num_params(SMOL) == 134_515_008
    assert num_params(LLAMA_8B) == 8_030_261_248


def test_parameter_count_equals_the_tree(tiny_config):
    checkpoint = synthetic_checkpoint(tiny_config[0])
    import jax

    total = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params))
    assert num_params(tiny_config[0]) == total


def test_a_page_of_llama_8b_is_128_kib_a_token():
    assert page_bytes(LLAMA_8B, 64, "bfloat16") == 64 * 131_072


@pytest.mark.parametrize(("model", "device"), [(SMOL, CPU), (LLAMA_8B, H200)])
def test_zero_flags_give_a_whole_config_that_fits(model, device):
    config = resolve(model, EngineConfig(), device)
    assert None not in dataclasses.asdict(config).values()
    pool = config.num_pages * page_bytes(model, config.page_size, config.kv_dtype)
    weights = num_params(model) * (4 if device.platform == "cpu" else 2)
    assert pool + weights < device.free_bytes
    assert config.decode_batch_sizes[-1] == config.num_slots
    assert config.num_pages * config.page_size >= config.max_context_len


def test_what_cannot_fit_is_refused_with_the_bytes():
    small = DeviceFacts(platform="gpu", free_bytes=17 * 10**9)
    with pytest.raises(ValueError, match="lower max_context_len"):
        resolve(LLAMA_8B, EngineConfig(), small)
    with pytest.raises(ValueError, match="num_pages 100000 needs"):
        resolve(SMOL, EngineConfig(num_pages=100_000), CPU)


def test_a_context_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="at most the model's context_len 8192"):
        resolve(SMOL, EngineConfig(max_context_len=8193), CPU)


def test_sizes_that_are_given_are_kept():
    given = EngineConfig(
        num_slots=3,
        max_context_len=100,
        num_pages=20,
        page_size=16,
        kv_dtype="bfloat16",
    )
    config = resolve(SMOL, given, CPU)
    assert (config.num_slots, config.num_pages, config.kv_dtype) == (3, 20, "bfloat16")
    assert config.decode_batch_sizes == (3,)
    assert all(tokens < 100 for _, tokens in config.prefill_shapes)
