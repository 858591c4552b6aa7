"""Whole steps as they are lowered for a GPU: which kernels they call, and how often."""

import dataclasses
import re

import jax
import pytest

from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.configs import load_config, parse_config
from headrace.engine.device_facts import place_params
from headrace.engine.model_runner import ModelRunner
from headrace.pallas_kernels import gpu_target
from headrace.pallas_kernels.paged_attention import api
from headrace.pallas_kernels.quantized_matmul import tuning


def _runner(model, **changes):
    """Nothing of it is compiled or run here."""
    _, config = parse_config(load_config("tiny"))
    config = dataclasses.replace(
        config, param_dtype="bfloat16", kv_dtype="bfloat16", page_size=32,
        num_pages=40, num_slots=8, decode_batch_sizes=(8,), prefill_shapes=((1, 32),),
    )  # fmt: skip
    config = dataclasses.replace(config, **changes)
    checkpoint = synthetic_checkpoint(model, dtype="bfloat16")
    params = round_checkpoint(checkpoint, Rounding.of(config)).params
    return ModelRunner(model, config, place_params(params, "bfloat16"))


@pytest.fixture(scope="module")
def model():
    shapes, _ = parse_config(load_config("tiny"))
    return dataclasses.replace(shapes, num_layers=3)


@pytest.fixture(scope="module")
def runner(model):
    return _runner(model)


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
    return [re.findall(r"(?:paged|quantized)_\w+", places[call])[-1] for call in calls]


def test_each_layer_of_a_decode_step_calls_the_kernel_and_its_merge(runner):
    names = _kernels(runner, ("decode", 8), (9, 0))
    assert names == ["paged_decode", "paged_decode_merge"] * 3


def test_each_layer_of_a_prefill_step_calls_one_kernel(runner):
    assert _kernels(runner, ("prefill", (1, 32)), (9, 0)) == ["paged_prefill"] * 3


def test_a_gpu_without_the_kernels_takes_plain_xla(runner, caplog):
    api._say_once.cache_clear()
    assert _kernels(runner, ("decode", 8), (10, 0)) == []
    assert "(10, 0), not (9, 0)" in caplog.messages[0] and len(caplog.messages) == 1


def test_each_product_with_a_grouped_weight_is_one_kernel(model):
    runner = _runner(model, quantization="int4-g128")
    names = _kernels(runner, ("decode", 8), (9, 0))
    attends = ["paged_decode", "paged_decode_merge"]
    product = "quantized_matmul"
    assert names == [product, *attends, *[product] * 3] * 3
    names = _kernels(runner, ("prefill", (1, 32)), (9, 0))
    assert names == [product, "paged_prefill", *[product] * 3] * 3
    assert _kernels(runner, ("decode", 8), (10, 0)) == []


def test_how_products_add_up_follows_from_the_largest_bucket_of_the_role(
    model, monkeypatch
):
    """Generating rows have one form in all buckets, and filling rows theirs."""
    seen = set()
    real = tuning.tuning

    def noting(outputs, inputs, **sizes):
        seen.add((sizes["rows"], sizes["most_rows"]))
        return real(outputs, inputs, **sizes)

    monkeypatch.setattr(tuning, "tuning", noting)
    runner = _runner(
        model, quantization="int4-g128", quantization_skip=(), num_slots=24,
        decode_batch_sizes=(8, 24), prefill_shapes=((1, 32), (2, 64)),
    )  # fmt: skip
    found = {}
    keys = [("decode", 8), ("decode", 24), ("prefill", (1, 32)), ("prefill", (2, 64))]
    for key in keys:
        seen.clear()
        _kernels(runner, key, (9, 0))
        found[key] = set(seen)
    # The head sees eight rows of a chunk.
    assert list(found.values()) == [
        {(8, 24)}, {(24, 24)}, {(32, 128), (8, 128)}, {(128, 128), (8, 128)}
    ]  # fmt: skip
