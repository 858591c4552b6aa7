"""The steps of an engine for a GPU: lowered, and compiled where that works."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from headrace.configs import load_config, parse_config
from headrace.engine import sampler, thresholds
from headrace.scripts import gpu_compile
from headrace.scripts.gpu_programs import StepSizes, step_programs

PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"
HAS_COMPILER = any(importlib.util.find_spec(name) for name in PLUGINS)

_SORT = re.compile(r"(stablehlo|chlo)\.(sort|top_k)")
Z = jax.ShapeDtypeStruct((4, 2048), jnp.float32)


def _lowered(function, *args):
    """The program for a GPU, before XLA; this needs no compiler for one."""
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _loops_on_data(text):
    """The conditions of loops that look at more than a counter."""
    conditions = re.findall(r"cond \{(.*?)\} do \{", text, re.DOTALL)
    return [c for c in conditions if "reduce" in c or "call" in c]


def _run_gate(*flags):
    return subprocess.run(
        [sys.executable, "-m", "headrace.scripts.check_gpu_compile", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def tiny_programs(tiny_config):
    model = dataclasses.replace(tiny_config[0], vocab_size=2048)
    sizes = StepSizes(model=model, rows=4, context=64, chunk=16)
    return step_programs(sizes, dataclasses.replace(tiny_config[1], num_slots=None))


@pytest.mark.parametrize("name", ["greedy", "sampled", "full"])
def test_sampling_is_lowered_for_a_gpu_without_a_sort_or_a_loop_on_data(
    name, tiny_programs
):
    program = tiny_programs["sample", name, 4]
    text = _lowered(program.function, *program.args)
    assert not _SORT.search(text)
    assert _loops_on_data(text) == []
    assert ("stablehlo.while" in text) == (name != "greedy")


def test_what_a_gpu_should_not_have_is_seen_in_a_lowered_program():
    k_B1 = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    p_B = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert _loops_on_data(_lowered(thresholds.top_k_by_halving, Z, k_B1))
    assert _loops_on_data(_lowered(sampler.best_by_trial, Z, Z, p_B))
    assert _SORT.search(_lowered(lambda z: jax.lax.top_k(z, 20), Z))
    assert _SORT.search(_lowered(jnp.sort, Z))


def test_decode_and_prefill_are_among_the_programs_and_donate_pool_and_logits(
    tiny_programs,
):
    assert [key[0] for key in tiny_programs] == ["decode", "prefill", *["sample"] * 3]
    for key in (("decode", 4), ("prefill", (1, 16))):
        params, pools, logits, *_ = tiny_programs[key].args
        assert tiny_programs[key].donated == (1, 2)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
        assert logits.shape == (4, 1, 2048)
        assert len(jax.tree.leaves(pools)) == 2


def test_bytes_that_a_step_must_move_follow_from_the_model():
    model, _ = parse_config(load_config("llama3_1_8b"))
    model = dataclasses.replace(model, num_layers=2)
    sizes = StepSizes(model=model, rows=64, context=1024, chunk=512)
    layer = 4096 * (6144 + 4096 + 3 * 14336 + 2)
    assert sizes.layer_bytes == 2 * layer
    head, norm = 128256 * 4096, 4096
    assert sizes.floor_bytes("decode") == 2 * (2 * layer + head + norm + 64 * 4096)
    assert sizes.floor_bytes("prefill") == 2 * (2 * layer + head + norm + 512 * 4096)
    assert sizes.floor_bytes("sample") == 64 * 128256 * 4
    token = 2 * 2 * 8 * 128 * 2
    assert sizes.kv_bytes("decode") == 64 * 1024 * token
    assert sizes.kv_bytes("prefill") == 1024 * token
    assert sizes.kv_bytes("sample") == 0
    # Kernels load whole tiles: 1,000 tokens are as many as 1,024; of a chunk every pair
    # of 64 queries of a head loads for itself, the last of 16 all 1,024.
    shorter = dataclasses.replace(sizes, context=1000)
    assert shorter.loaded_kv_bytes("decode") == sizes.kv_bytes("decode")
    assert sizes.loaded_kv_bytes("prefill") > 8 * 1024 * token
    limits = sizes.temporary_limits("decode")
    assert list(limits.values()) == [2 * layer, 64 * 1024 * token // 2, 64_000_000]
    filled = sizes.temporary_limits("prefill")
    assert list(filled.values()) == [2 * layer, 2 * 512 * 2 * 14336 * 2]
    logits = sizes.temporary_limits("sample")
    assert list(logits.values()) == [5 * 64 * 128256 * 4]
    tied = dataclasses.replace(model, tie_embeddings=True)
    tied_sizes = dataclasses.replace(sizes, model=tied)
    assert tied_sizes.floor_bytes("decode") == sizes.floor_bytes("decode")
    assert tied_sizes.layer_bytes == sizes.layer_bytes


def test_targets_lie_in_the_package_with_capability_and_bandwidth():
    targets = [gpu_compile.read_target(name) for name in gpu_compile.target_names()]
    assert {t.name: (t.capability, t.bytes_per_s) for t in targets} == {
        "a100_80gb": ((8, 0), 2_039_040_000_000),
        "b200": ((10, 0), 7_672_320_000_000),
        "h100_sxm": ((9, 0), 3_352_320_000_000),
        "h200_sxm": ((9, 0), 4_800_000_000_000),
    }


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler for GPUs is installed")
def test_without_a_compiler_for_gpus_the_gate_says_so():
    with pytest.raises(NotImplementedError, match="no compiler for GPUs here"):
        gpu_compile.compile_for_gpu(
            lambda z: z, (Z,), target=gpu_compile.read_target("h200_sxm")
        )
    done = _run_gate("--config=tiny")
    assert done.returncode == 1
    assert "error: no compiler for GPUs here" in done.stderr


def test_flags_that_the_gate_does_not_heed_are_refused():
    done = _run_gate("--config=tiny", "--num_slots=4")
    assert done.returncode == 1
    assert "error: the gate takes --config" in done.stderr


@pytest.mark.skipif(not HAS_COMPILER, reason="needs what gpu_compile.py lists")
def test_compiled_for_a_gpu_a_step_reads_weights_once_and_moves_no_cache():
    done = _run_gate(
        "--config=llama3_2_1b",
        "--num_layers=2",
        "--max_traffic=1.1",
        "--expect_kernel=paged_decode",
        "--expect_kernel=paged_prefill",
        "--expect_kernel=no_such_kernel",
    )
    assert done.returncode == 1, done.stderr
    assert "FAIL all programs: calls of no_such_kernel: 0, limit at least 2" in (
        done.stdout
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [fault[1] for fault in facts["faults"]] == ["calls of no_such_kernel"]
    decode = facts["programs"]["decode[64]"]
    assert decode["read_bytes"] == decode["floor_bytes"]
    floor = decode["floor_bytes"] + decode["kv_bytes"]
    assert 1 < decode["moved_bytes"] / floor < 1.1
    assert decode["mosaic"]["paged_decode"] == 2
    assert {kernel["name"] for kernel in facts["ptxas"]} == {
        "paged_decode", "paged_decode_merge", "paged_prefill",
    }  # fmt: skip
    assert facts["programs"]["sample[full, 64]"]["temp_bytes"] < 5 * 64 * 128256 * 4
