"""An engine over quantized weights: the dequantized model's tokens, in fewer bytes."""

import dataclasses

import jax
import numpy as np
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.configs.quantization import parse_scheme
from headrace.engine import memory_sizes, sizing, weight_sizes
from headrace.layers import kv_cache as kv
from headrace.layers.quantized import is_quantized, tree_bytes
from headrace.pallas_kernels.quantized_matmul import api

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SCHEMES = ["int8", "int4-g32", "int4-g32-z", "fp8", "w8a8", "fp8-w8a8"]


@pytest.fixture(scope="module")
def run(tiny_config, tiny_checkpoint):
    """run(scheme, checkpoint): bits of some prompts together, and of one alone."""

    def bits(output):
        one = output.outputs[0]
        return one.token_ids, [
            [(i, e.logprob) for i, e in entry.items()] for entry in one.logprobs
        ]

    def go(scheme=None, checkpoint=tiny_checkpoint, **changes):
        config = dataclasses.replace(tiny_config[1], quantization=scheme, **changes)
        llm = LLM.from_checkpoint(checkpoint, config=config)
        rng = np.random.default_rng(0)
        prompts = [
            {"prompt_token_ids": rng.integers(1, 500, n).tolist()}
            for n in (5, 40, 17, 1, 90)
        ]
        together = [bits(o) for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
        (alone,) = llm.generate(prompts[1:2], GREEDY, use_tqdm=False)
        facts = llm.engine_config, tree_bytes(llm._runner.params)
        llm.close()
        return together, bits(alone), facts

    return go


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_are_free_of_company_and_the_plan_counts_every_byte(
    run, scheme, tiny_config
):
    together, alone, (config, num_bytes) = run(scheme)
    assert together[1] == alone
    assert config.quantization == scheme
    assert weight_sizes.weights_bytes(tiny_config[0], config) == num_bytes


@pytest.mark.skipif(not api.cpu_identity(), reason="no C++ compiler here")
@pytest.mark.parametrize("scheme", ["int8", "int4-g32-z", "fp8"])
def test_bits_are_those_of_the_dequantized_model(run, scheme, tiny_checkpoint):
    rounding = Rounding(scheme=parse_scheme(scheme), skip=("embedding", "head"))
    rounded = round_checkpoint(tiny_checkpoint, rounding)
    plain = jax.tree.map(
        lambda leaf: leaf.dequantized() if is_quantized(leaf) else leaf,
        rounded.params,
        is_leaf=is_quantized,
    )
    whole = dataclasses.replace(tiny_checkpoint, params=plain)
    assert run(scheme)[0] == run(None, whole)[0]


def test_weights_that_come_quantized_say_so_and_are_not_rounded_again(
    run, tiny_checkpoint
):
    rounding = Rounding(scheme=parse_scheme("int8"), skip=("embedding", "head"))
    rounded = round_checkpoint(tiny_checkpoint, rounding)
    together, _, (config, _) = run(None, rounded)
    assert config.quantization == "int8" and together == run("int8")[0]
    with pytest.raises(ValueError, match="quantized already, as int8"):
        run("int4-g32", rounded)


def test_a_group_that_does_not_divide_is_refused_before_anything_is_made(tiny_config):
    model, config = tiny_config
    config = dataclasses.replace(config, quantization="int4-g96")
    device = sizing.DeviceFacts(platform="cpu", free_bytes=2**34)
    with pytest.raises(ValueError, match="group size 96"):
        sizing.resolve(model, config, device)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_8_bits_keep_bits_free_of_company_and_near_the_others(run, kv_dtype):
    paged = dict(page_size=32, num_pages=None)
    together, alone, (config, _) = run(kv_dtype=kv_dtype, **paged)
    assert together[1] == alone and config.kv_dtype == kv_dtype
    wide, _, _ = run(**paged)

    def first_logprob(found):
        return np.array([logprobs[0][0][1] for _, logprobs in found])

    off = np.abs(first_logprob(together) - first_logprob(wide))
    assert 0 < off.max() < 0.2


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_what_a_page_of_8_bits_takes(kv_dtype, tiny_config):
    model = tiny_config[0]
    cache = kv.allocate(
        model, num_pages=3, page_size=32, storage=kv.KVStorage(dtype=kv_dtype)
    )
    planned = memory_sizes.page_bytes(model, 32, kv_dtype)
    assert kv.page_bytes(cache) == planned
    assert planned < memory_sizes.page_bytes(model, 32, "float32") / 3


def test_preempted_pages_of_8_bits_come_back_bit_for_bit(run, tiny_config):
    """A pool too small for all: pages and their scales go to the host and return."""
    model, _ = tiny_config
    page = memory_sizes.page_bytes(model, 32, "int8")
    ample = run(kv_dtype="int8", page_size=32, num_pages=None)[0]
    tight = dict(num_pages=6, max_context_len=128, host_kv_bytes=40 * page)
    assert run(kv_dtype="int8", page_size=32, **tight)[0] == ample


def test_short_pages_of_8_bits_are_refused():
    with pytest.raises(ValueError, match="page_size of at least 32, got 16"):
        EngineConfig(kv_dtype="int8", page_size=16)


@pytest.mark.parametrize("skip", [(0,), (1,)])
def test_layers_left_out_keep_wide_pages(run, skip, tiny_config):
    paged = dict(page_size=32, num_pages=None, kv_dtype="int8")
    together, alone, (config, _) = run(**paged, kv_dtype_skip=skip)
    assert together[1] == alone
    every = run(**paged)[0]
    assert together != every and together != run(page_size=32, num_pages=None)[0]
    model, storage = tiny_config[0], kv.KVStorage.of(config)
    cache = kv.allocate(model, num_pages=3, page_size=32, storage=storage)
    assert [[leaf.dtype.name for leaf in group] for group in cache] == [
        ["int8", "int8", "float32", "float32"],
        ["float32", "float32"],
    ]
    assert kv.page_bytes(cache) == memory_sizes.page_bytes_of(model, config)


def test_preempted_pages_of_two_types_come_back_bit_for_bit(run, tiny_config):
    paged = dict(kv_dtype="int8", page_size=32, kv_dtype_skip=(0,))
    ample, _, (config, _) = run(**paged, num_pages=None)
    page = memory_sizes.page_bytes_of(tiny_config[0], config)
    tight = dict(num_pages=6, max_context_len=128, host_kv_bytes=40 * page)
    assert run(**paged, **tight)[0] == ample


@pytest.mark.parametrize("skip, kv_dtype, message", [
    ((0,), None, "kv_dtype beside kv_dtype_skip"),
    ((2,), "int8", "layers under 2"),
    ((1, 0), "int8", "ascending"),
    ((0, 1), "int8", "leave a layer of the 2"),
])  # fmt: skip
def test_what_cannot_be_left_out_is_refused(skip, kv_dtype, message, tiny_config):
    model, config = tiny_config
    config = dataclasses.replace(
        config, page_size=32, kv_dtype=kv_dtype, kv_dtype_skip=skip
    )
    device = sizing.DeviceFacts(platform="cpu", free_bytes=2**34)
    with pytest.raises(ValueError, match=message):
        sizing.resolve(model, config, device)
