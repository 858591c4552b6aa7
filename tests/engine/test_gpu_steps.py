"""Whole steps as they are lowered for a GPU: which kernels they call, and how often."""

import dataclasses
import re

import jax
import pytest

from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import load_config, parse_config
from headrace.engine.device_facts import place_params
from headrace.engine.model_runner import ModelRunner
from headrace.pallas_kernels import gpu_target
from headrace.pallas_kernels.paged_attention import api


@pytest.fixture(scope="module")
def runner():
    """Nothing of it is compiled or run here."""
    model, config = parse_config(load_config("tiny"))
    model = dataclasses.replace(model, num_layers=3)
    config = dataclasses.replace(
        config, param_dtype="bfloat16", kv_dtype="bfloat16", page_size=32,
        num_pages=40, num_slots=8, decode_batch_sizes=(8,), prefill_shapes=((1, 32),),
    )  # fmt: skip
    params = place_params(synthetic_checkpoint(model).params, "bfloat16")
    return ModelRunner(model, config, params)


def _kernels(runner, key, capability):
    """Names of the Mosaic kernels that a step calls, one per call."""
    program = runner.describe(key)
    with gpu_target.compiling_for(capability):
        traced = jax.jit(program.function, donate_argnums=program.donated).trace(
            *program.args
        )
        lowered = traced.lower(lowering_platforms=("cuda",))
    text = lowered.as_text(debug_info=True)
    calls = re.findall(r"custom_call @mosaic_gpu.*loc\((#loc\d+)\)", text)
    places = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))
    return [re.findall(r"paged_\w+", places[call])[-1] for call in calls]


def test_each_layer_of_a_decode_step_calls_the_kernel_and_its_merge(runner):
    names = _kernels(runner, ("decode", 8), (9, 0))
    assert names == ["paged_decode", "paged_decode_merge"] * 3


def test_each_layer_of_a_prefill_step_calls_one_kernel(runner):
    assert _kernels(runner, ("prefill", (1, 32)), (9, 0)) == ["paged_prefill"] * 3


def test_a_gpu_without_the_kernels_takes_plain_xla(runner, caplog):
    api._say_once.cache_clear()
    assert _kernels(runner, ("decode", 8), (10, 0)) == []
    assert "(10, 0), not (9, 0)" in caplog.messages[0] and len(caplog.messages) == 1
