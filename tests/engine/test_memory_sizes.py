"""What memory_sizes counts and estimates, against arrays and compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.configs import EngineConfig, load_config, parse_config
from headrace.configs.drafts import DraftShapes
from headrace.engine import memory_sizes, page_moves, sizing, steps
from headrace.engine.packed_layout import layout_of
from headrace.engine.processors import empty_extras
from headrace.engine.programs import num_mask_words, program_keys, program_name
from headrace.engine.proposers import drafting_of
from headrace.engine.sizing import DeviceFacts
from headrace.engine.slots import empty_slots
from headrace.layers import kv_cache as kv
from headrace.layers.models import param_shapes
from headrace.pallas_kernels.paged_attention import tuning

MODELS = {
    name: parse_config(load_config(name))[0]
    for name in ("tiny", "smollm2_135m", "llama3_2_1b", "llama3_1_8b")
}
H200 = DeviceFacts(
    platform="gpu",
    free_bytes=113_548_197_888,
    host_free_bytes=10**12,
    capability=(9, 0),
)


def _nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _resolved(name, device=H200, **changes):
    model = MODELS[name]
    return model, sizing.resolve(model, EngineConfig(**changes), device)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_pages_are_those_of_the_arrays(name):
    model, config = _resolved(name)
    plan = sizing.plan_of(model, config, H200)
    leaves = jax.tree.leaves(param_shapes(model), is_leaf=lambda n: type(n) is tuple)
    assert plan.weights_bytes == 2 * sum(int(np.prod(shape)) for shape in leaves)
    pool = kv.cache_shapes(
        model, num_pages=config.num_pages, page_size=64, storage=kv.KVStorage.of(config)
    )
    assert plan.pool_bytes == _nbytes(pool)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(7, 8192),
    st.integers(1, 64),
    st.integers(1, 256),
    st.sampled_from([16, 32, 64]),
)
def test_state_is_counted_to_the_byte(slots, context, stops, bad_words, page_size):
    """A new field of the slots or the extras fails this, until it is counted."""
    model, config = _resolved(
        "smollm2_135m", num_slots=slots, max_context_len=context,
        max_stop_ids=stops, max_bad_words=bad_words, page_size=page_size,
    )  # fmt: skip
    V = model.vocab_size
    arrays = jax.eval_shape(
        lambda: (
            jnp.zeros((slots, 1, V), jnp.float32),
            empty_slots(layout_of(config)),
            empty_extras(slots, V, bad_words),
            jnp.zeros((slots, num_mask_words(V)), jnp.int32),
        )
    )
    assert memory_sizes.state_bytes(model, config) == _nbytes(arrays)
    drafts = dataclasses.replace(config, draft="prompt-lookup", num_drafts=5)
    shapes = DraftShapes(model=model, weights_bytes=0, hidden_dim=96)
    eagle = dataclasses.replace(
        drafts, draft="eagle:HEAD", draft_shapes=shapes, adapts_drafts=False,
        numerics="fast", acceptance="rejection",
    )  # fmt: skip
    for one in (drafts, eagle):
        more = jax.eval_shape(
            lambda one=one: (
                jnp.zeros((slots, 5, V), jnp.float32), drafting_of(model, one)
            )
        )  # fmt: skip
        assert memory_sizes.state_bytes(model, one) == _nbytes((arrays, more))


def test_what_a_step_brings_and_gives_by_hand():
    """64 slots of SmolLM2, 49,152 ids, nothing scored, no pages moved; twice all."""
    model, config = _resolved(
        "smollm2_135m", DeviceFacts(platform="cpu", free_bytes=2**34), num_slots=64
    )
    packed = 4 * (1 + 3 * 64 + 16 * (22 + 8 + 128) + 256)
    row = 49152 // 8 + 8 + 12 + 20 * 8
    extras = 4 * (2 * 49152 + 16 * 8 + 7)
    step = packed + 64 * row + 16 * extras
    assert memory_sizes.step_bytes(model, config) == 2 * step
    scored = dataclasses.replace(config, scoring=True, host_kv_bytes=10**9)
    page = memory_sizes.page_bytes(model, 64, "float32")
    more = 256 * (12 + 20 * 8) + 8 * page
    assert memory_sizes.step_bytes(model, scored) == 2 * (step + more)
    rows = dataclasses.replace(config, max_logprobs=-1)
    assert memory_sizes.step_bytes(model, rows) == 2 * (step + 64 * 4 * 49152)


def test_constants_that_are_said_twice_are_the_same():
    assert memory_sizes.SPLIT_KEYS == tuning.SPLIT
    assert memory_sizes.KERNEL_HEAD_DIMS == tuning.HEAD_DIMS
    assert memory_sizes.KERNEL_GROUP == min(tuning.MAX_DECODE_ROWS.values())
    assert sizing._KERNELS_CAPABILITY == tuning.CAPABILITY
    assert memory_sizes._PAGES_PER_MOVE == page_moves.PAGES_PER_MOVE
    assert memory_sizes._SCORE_ROWS == steps.SCORE_ROWS
    assert memory_sizes._HEAD_ROWS == steps.MIN_HEAD_ROWS


def test_no_program_on_this_cpu_takes_more_than_was_estimated(tiny_llm):
    runner = tiny_llm._runner
    for key in runner.program_keys():
        bound = memory_sizes.program_temp_bytes(
            key, runner.model_config, runner.config, "cpu"
        )
        compiled = tiny_llm.ledger.entries[program_name(key)].temp_bytes
        assert compiled <= bound, key
    kinds = {key[0] for key in runner.program_keys()}
    assert {"decode", "prefill", "score", "sample", "logits", "copy"} <= kinds


# The largest temporaries of any program, compiled with jax 0.12.0.1 for an H200 and,
# last, a B200. Who changes what programs keep compiles anew:
# python -m headrace.scripts.preflight --config=NAME --target=h200
@pytest.mark.parametrize(
    ("name", "capability", "changes", "compiled"),
    [
        ("llama3_1_8b", (9, 0), {}, 2_176_989_720),
        ("llama3_2_1b", (9, 0), {}, 1_098_983_960),
        ("smollm2_135m", (9, 0), {}, 203_870_576),
        (
            "llama3_1_8b",
            (9, 0),
            {"num_slots": 32, "max_context_len": 2048, "scoring": True},
            66_575_216,
        ),
        ("llama3_1_8b", (10, 0), {}, 531_650_672),
    ],
)
def test_the_estimate_is_near_what_compilers_for_gpus_take(
    name, capability, changes, compiled
):
    device = dataclasses.replace(H200, capability=capability)
    model, config = _resolved(name, device, **changes)
    bound = sizing.plan_of(model, config, device).temp_bytes
    assert compiled <= bound <= 2 * compiled + 64_000_000


H200_8B = {
    ("decode", 8): 68_664_344,
    ("decode", 256): 2_176_989_720,
    ("prefill", (1, 128)): 13_182_224,
    ("prefill", (1, 512)): 52_701_968,
    ("prefill", (1, 2048)): 210_780_944,
    ("sample", "greedy", 256): 2_099_064,
    ("sample", "sampled", 8): 16_631_152,
    ("sample", "full", 16): 35_988_080,
    ("sample", "full", 256): 526_167_152,
    ("extras",): 1,
    ("copy", 8): 67_108_880,
}
CPU_SMOLLM2 = {
    ("decode", 1): 198_912,
    ("decode", 64): 12_730_368,
    ("prefill", (1, 64)): 4_718_720,
    ("prefill", (1, 256)): 5_398_852,
    ("prefill", (4, 64)): 5_399_248,
    ("sample", "greedy", 32): 6_355_856,
    ("sample", "sampled", 64): 50_435_704,
    ("sample", "full", 32): 31_512_368,
    ("sample", "full", 64): 63_019_824,
    ("copy", 8): 23_592_992,
}


@pytest.mark.parametrize(
    ("name", "device", "compiled"),
    [
        ("llama3_1_8b", H200, H200_8B),
        ("smollm2_135m", DeviceFacts(platform="cpu", free_bytes=2**35), CPU_SMOLLM2),
    ],
)
def test_no_program_takes_more_than_was_estimated(name, device, compiled):
    """Temporaries as compiled for the sizes that an engine chooses there."""
    model, config = _resolved(name, device)
    for key, temp_bytes in compiled.items():
        bound = memory_sizes.program_temp_bytes(key, model, config, device.attention)
        assert temp_bytes <= bound <= 2 * temp_bytes + 140_000_000, key


def test_the_bound_of_an_engine_is_its_largest_programs():
    model, config = _resolved("llama3_1_8b", scoring=True)
    keys = program_keys(config, can_move=True)
    bounds = {
        program_name(key): memory_sizes.program_temp_bytes(
            key, model, config, "kernels"
        )
        for key in keys
    }
    assert memory_sizes.temp_bytes_bound(model, config, "kernels") == max(
        bounds.values()
    )
    assert max(bounds, key=bounds.get) == "decode[256]"
