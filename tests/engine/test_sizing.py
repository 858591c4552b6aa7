"""Sizes that follow from the model and the free memory."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import EngineConfig, load_config, parse_config
from headrace.engine.memory_sizes import page_bytes
from headrace.engine.sizing import DeviceFacts, nearest, plan_of, resolve
from headrace.engine.weight_sizes import num_params

SMOL = parse_config(load_config("smollm2_135m"))[0]
LLAMA_8B = parse_config(load_config("llama3_1_8b"))[0]
CPU = DeviceFacts(platform="cpu", free_bytes=16 * 2**30)
H200 = DeviceFacts(
    platform="gpu",
    free_bytes=140 * 10**9,
    host_free_bytes=1000 * 10**9,
    capability=(9, 0),
)


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
    # None stays where it means "no bound", or "as they come".
    open_keys = {k for k, v in dataclasses.asdict(config).items() if v is None}
    assert open_keys == {
        "max_queued_requests", "max_queued_tokens", "max_tokens_per_step",
        "quantization", "draft", "draft_shapes",
    }  # fmt: skip
    pool = config.num_pages * page_bytes(model, config.page_size, config.kv_dtype)
    weights = num_params(model) * (4 if device.platform == "cpu" else 2)
    assert pool + weights < device.free_bytes
    assert config.decode_batch_sizes[-1] == config.num_slots
    assert config.num_pages * config.page_size >= config.max_context_len


def test_what_cannot_fit_is_refused_with_the_bytes():
    small = DeviceFacts(platform="gpu", free_bytes=25 * 10**9)
    with pytest.raises(ValueError, match="lower max_context_len"):
        resolve(LLAMA_8B, EngineConfig(), small)
    less = DeviceFacts(platform="gpu", free_bytes=17 * 10**9)
    with pytest.raises(ValueError, match="weights alone need 2 such devices"):
        resolve(LLAMA_8B, EngineConfig(), less)
    with pytest.raises(ValueError, match="num_pages 100000 needs .* pages fit"):
        resolve(SMOL, EngineConfig(num_pages=100_000), CPU)


@pytest.mark.parametrize(
    ("device", "config", "wanted"),
    [
        (H200, {}, "pool"),
        (dataclasses.replace(H200, host_free_bytes=8 * 10**9), {}, 2 * 10**9),
        (H200, {"numerics": "fast"}, 0),
        (H200, {"host_kv_bytes": 7}, 7),
        (CPU, {}, 0),
    ],
)
def test_host_memory_for_preempted_requests(device, config, wanted):
    resolved = resolve(
        LLAMA_8B if device is not CPU else SMOL, EngineConfig(**config), device
    )
    if wanted == "pool":
        page = page_bytes(LLAMA_8B, resolved.page_size, resolved.kv_dtype)
        wanted = resolved.num_pages * page
    assert resolved.host_kv_bytes == wanted


def _num_pages(model, device, **changes):
    return resolve(model, EngineConfig(**changes), device).num_pages


def test_a_little_more_free_memory_gives_the_same_pool():
    """Regression: each start had its own pool size, and so no stored programs."""

    def pages(model, platform, gigabytes):
        free = int(gigabytes * 10**9)
        return _num_pages(model, DeviceFacts(platform=platform, free_bytes=free))

    assert pages(SMOL, "cpu", 4.200) == pages(SMOL, "cpu", 4.204) == 480
    assert pages(LLAMA_8B, "gpu", 80.2) == pages(LLAMA_8B, "gpu", 80.4) == 6144


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8192), st.integers(40 * 10**8, 200 * 10**9))
def test_rounding_costs_at_most_a_sixteenth_and_keeps_room_for_a_request(context, free):
    """The pool fits, holds one request, and wastes no more than it says."""
    device = DeviceFacts(platform="gpu", free_bytes=free)
    config = resolve(SMOL, EngineConfig(max_context_len=context), device)
    fitting = plan_of(SMOL, config, device).fitting_pages
    per_request = -(-context // config.page_size)
    enough = config.num_slots * per_request + 1
    assert per_request + 1 <= config.num_pages <= min(fitting, enough)
    assert config.num_pages >= min(fitting * 15 / 16, enough)


def test_a_pool_of_exactly_one_request_is_not_rounded_away():
    sizes = {"max_context_len": 64 * 100, "memory_fraction": 1.0}
    ample = DeviceFacts(platform="gpu", free_bytes=10**12)
    plan = plan_of(SMOL, resolve(SMOL, EngineConfig(**sizes), ample), ample)
    need = plan.fixed_bytes + 101 * page_bytes(SMOL, 64, "bfloat16")
    fits = DeviceFacts(platform="gpu", free_bytes=need)
    assert _num_pages(SMOL, fits, **sizes) == 101
    less = DeviceFacts(platform="gpu", free_bytes=need - 1)
    with pytest.raises(ValueError, match="needs 101 pages .* only 100 fit"):
        _num_pages(SMOL, less, **sizes)
    # What it offers is a page less.
    assert nearest(SMOL, EngineConfig(**sizes), less).max_context_len == 64 * 99
    assert _num_pages(SMOL, less, **sizes | {"max_context_len": 64 * 99}) == 100


def test_ample_memory_lets_every_slot_hold_a_whole_context():
    ample = DeviceFacts(platform="gpu", free_bytes=10**12)
    assert _num_pages(SMOL, ample, max_context_len=1000) == 256 * 16 + 1


def test_a_context_longer_than_the_model_is_refused():
    with pytest.raises(ValueError, match="at most the model's context_len 8192"):
        resolve(SMOL, EngineConfig(max_context_len=8193), CPU)


def test_sizes_that_are_given_are_kept():
    config = EngineConfig(
        num_slots=3,
        max_context_len=100,
        num_pages=20,
        page_size=16,
        kv_dtype="bfloat16",
    )
    config = resolve(SMOL, config, CPU)
    assert (config.num_slots, config.num_pages, config.kv_dtype) == (3, 20, "bfloat16")
    assert config.decode_batch_sizes == (1, 3)
    assert all(tokens < 100 for _, tokens in config.prefill_shapes)
