"""The memory plan: its sums, what fits into it, and what it refuses."""

import dataclasses
import logging

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import LLM
from headrace.configs import EngineConfig, load_config, parse_config
from headrace.engine import llm as llm_module
from headrace.engine import memory_plan, memory_sizes, sizing
from headrace.engine.device_facts import device_facts
from headrace.engine.memory_plan import MemoryPlan
from headrace.engine.sizing import DeviceFacts

MODELS = {
    name: parse_config(load_config(name))[0]
    for name in ("smollm2_135m", "llama3_2_1b", "llama3_1_8b")
}
H200 = DeviceFacts(
    platform="gpu",
    free_bytes=113_548_197_888,
    host_free_bytes=10**12,
    capability=(9, 0),
)
# By hand: 1000 fixed, pages of 30, of 2000 * 0.8 bytes.
BY_HAND = MemoryPlan(
    free_bytes=2000,
    memory_fraction=0.8,
    weights_bytes=700,
    state_bytes=150,
    step_bytes=50,
    temp_bytes=100,
    page_bytes=30,
    num_pages=20,
)


def test_a_plan_by_hand():
    assert (BY_HAND.budget_bytes, BY_HAND.fixed_bytes) == (1600, 1000)
    assert (BY_HAND.pool_bytes, BY_HAND.used_bytes) == (600, 1600)
    assert (BY_HAND.left_bytes, BY_HAND.fitting_pages) == (0, 20)
    # 19 pages without the dummy; 33 tokens take 3 pages of 16.
    assert BY_HAND.concurrent(32, 16) == 9
    assert BY_HAND.concurrent(33, 16) == 6
    assert BY_HAND.concurrent(320, 16) == 0
    small = dataclasses.replace(BY_HAND, weights_bytes=1301)
    assert (small.fitting_pages, small.left_bytes) == (0, -601)


PLANS = st.builds(
    MemoryPlan,
    free_bytes=st.integers(1, 10**12),
    memory_fraction=st.floats(0.01, 1.0),
    weights_bytes=st.integers(1, 10**12),
    state_bytes=st.integers(0, 10**10),
    step_bytes=st.integers(0, 10**10),
    temp_bytes=st.integers(0, 10**10),
    page_bytes=st.integers(1024, 10**8),
)


@settings(max_examples=200, deadline=None)
@given(PLANS, st.integers(1, 10**6), st.sampled_from([16, 32, 64]))
def test_what_fits_is_within_the_budget_and_a_page_more_is_not(plan, tokens, page_size):
    full = dataclasses.replace(plan, num_pages=plan.fitting_pages)
    if full.num_pages:
        assert 0 <= full.left_bytes
    assert full.left_bytes < plan.page_bytes
    assert full.used_bytes + full.left_bytes == full.budget_bytes <= full.free_bytes
    each, count = -(-tokens // page_size), full.concurrent(tokens, page_size)
    spare = max(0, full.num_pages - 1) - count * each
    assert 0 <= spare < each


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["smollm2_135m", "llama3_2_1b", "llama3_1_8b"]),
    st.integers(10**8, 200 * 10**9),
    st.integers(1, 512),
    st.integers(64, 8192),
)
def test_a_resolved_engine_never_exceeds_its_budget(name, free, slots, context):
    model = MODELS[name]
    device = dataclasses.replace(H200, free_bytes=free)
    config = EngineConfig(num_slots=slots, max_context_len=context)
    try:
        resolved = sizing.resolve(model, config, device)
    except ValueError:
        _check_offers(model, config, device)
        return
    plan = sizing.plan_of(model, resolved, device)
    assert plan.left_bytes >= 0
    assert 1 <= plan.concurrent(context, 64)


@given(st.integers(-5, 50), st.integers(-5, 50), st.integers(-5, 50))
def test_the_largest_that_fits_is_found(last, low, high):
    found = memory_plan.largest(lambda n: n <= last, low, high)
    fitting = [n for n in range(low, high + 1) if n <= last]
    assert found == max(fitting, default=None)


def _fits(model, config, device, **changes):
    try:
        sizing.resolve(model, dataclasses.replace(config, **changes), device)
    except ValueError:
        return False
    return True


def _check_offers(model, config, device):
    """What is offered fits, and no more would."""
    offer = sizing.nearest(model, config, device)
    context, slots = offer.max_context_len, offer.num_slots
    assert context is None or context < config.max_context_len
    if context is not None:
        assert _fits(model, config, device, max_context_len=context)
        more = min(context + config.page_size, config.max_context_len)
        assert not _fits(model, config, device, max_context_len=more)
    if slots is not None:
        assert _fits(model, config, device, num_slots=slots)
        assert not _fits(model, config, device, num_slots=slots + 1)
    if context is None and slots is None and offer.context_of_one_slot is not None:
        both = {"num_slots": 1, "max_context_len": offer.context_of_one_slot}
        assert _fits(model, config, device, **both)


def test_a_refusal_says_what_it_takes_of_what_there_is_and_what_fits():
    model = MODELS["llama3_1_8b"]
    device = dataclasses.replace(H200, free_bytes=40 * 10**9)
    config = EngineConfig(max_context_len=131072, num_slots=1024)
    with pytest.raises(ValueError) as error:
        sizing.resolve(model, config, device)
    text, offer = str(error.value), sizing.nearest(model, config, device)
    ample = dataclasses.replace(H200, free_bytes=10**12)
    plan = sizing.plan_of(model, sizing.resolve(model, config, ample), ample)
    pages = 2049 * 8_388_608
    for words in (
        "max_context_len 131072 needs 2049 pages of 8,388,608 bytes",
        f"only {(35_200_000_000 - plan.fixed_bytes) // 8_388_608} fit",
        f"it takes {plan.fixed_bytes + pages:,} of 35,200,000,000 bytes",
        "memory_fraction 0.88 of 40,000,000,000 free bytes",
        "weights 16,060,522,496,",
        f"temporaries {plan.temp_bytes:,} (estimated)",
        f"pages {pages:,};",
        f"; lower max_context_len to {offer.max_context_len} or lower num_slots to "
        f"{offer.num_slots}, or raise memory_fraction",
    ):
        assert words in text
    assert offer.max_context_len and offer.num_slots
    _check_offers(model, config, device)


def test_weights_that_need_several_devices_say_how_many():
    model = parse_config(load_config("llama3_3_70b"))[0]
    with pytest.raises(ValueError, match="the weights alone need 2 such devices"):
        sizing.resolve(model, EngineConfig(), H200)
    assert sizing.nearest(model, EngineConfig(), H200) == sizing.Nearest(
        max_context_len=None, num_slots=None, context_of_one_slot=None, num_devices=2
    )


def test_compiled_temporaries_replace_the_estimate_and_lost_donations_count():
    memory = {
        "decode[8]": [70, 700],
        "sample[full, 8]": [90, 0],
        "extras": [80, 0],
        "save[8]": [10, 0],
    }
    plan = memory_plan.with_compiled(BY_HAND, memory)
    assert (plan.temp_bytes, plan.are_temps_compiled) == (90, True)
    memory["prefill[1x32]"] = [60, 500]  # 100 bytes of the pool of 600 twice
    assert memory_plan.with_compiled(BY_HAND, memory).temp_bytes == 160


def test_compiled_programs_that_do_not_fit_are_refused_with_the_pages_that_do(caplog):
    with caplog.at_level(logging.INFO, "headrace.engine.memory_plan"):
        memory_plan.check_compiled(BY_HAND)
        assert caplog.records[-1].levelname == "INFO"
        # More than 0.8 of what is free, but it is there.
        fits = dataclasses.replace(BY_HAND, temp_bytes=500)
        memory_plan.check_compiled(fits)
        assert caplog.records[-1].levelname == "WARNING"
        assert "2,000 of 2,000 free bytes" in caplog.messages[-1]
    with pytest.raises(ValueError, match="2,001 of 2,000 .* num_pages to at most 19"):
        memory_plan.check_compiled(dataclasses.replace(BY_HAND, temp_bytes=501))
    with pytest.raises(ValueError, match="set num_slots or max_context_len lower"):
        memory_plan.check_compiled(dataclasses.replace(BY_HAND, temp_bytes=9999))


def test_an_engine_does_not_serve_what_would_run_out_of_memory(
    tiny_config, tiny_checkpoint, monkeypatch
):
    """The estimate is made to miss the temporaries; the compiled programs tell."""
    monkeypatch.setattr(memory_sizes, "temp_bytes_bound", lambda *_: 0)
    model, config = tiny_config
    config = dataclasses.replace(config, memory_fraction=1.0)
    ample = DeviceFacts(platform="cpu", free_bytes=2**34)
    plan = sizing.plan_of(model, sizing.resolve(model, config, ample), ample)
    facts = DeviceFacts(platform="cpu", free_bytes=plan.used_bytes + 1000)
    monkeypatch.setattr(llm_module, "device_facts", lambda _: facts)
    with pytest.raises(ValueError, match="compiled programs do not fit beside the"):
        LLM.from_checkpoint(tiny_checkpoint, config=config)


def test_weights_that_are_placed_already_count_as_free(monkeypatch):
    free = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    weights = {"a": jnp.zeros(1000), "b": jnp.zeros((8, 10), jnp.int4), "c": np.ones(3)}
    bare, placed = device_facts(), device_facts(weights)
    assert placed.free_bytes - bare.free_bytes == 4000 + 40
