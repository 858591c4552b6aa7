"""What the sample programs hold for a GPU, lowered, and compiled where that works."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from headrace.engine import sampler, thresholds
from headrace.scripts import compile_for_gpu

# Lines of programs that XLA made for an H100, shortened.
SORT = "%sort.1 = (f32[32,128256]{1,0}, s32[32,128256]{1,0}) sort(%p, %i), dims={1}"
TOP_K = '%c = (f32[32,5]) custom-call(%z), custom_call_target="__gpu$TopK"'
NARROW_SORT = "%sort.2 = s32[32,64]{1,0} sort(%p), dimensions={1}"
OPEN = "%while.7 = (s32[], s32[32,1]{1,0}) while(%t), condition=%c, body=%b"
COUNTED = OPEN + ', backend_config={"known_trip_count":{"n":"16"}}'

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


@pytest.mark.parametrize("name", ["greedy", "sampled", "full"])
def test_sampling_is_lowered_for_a_gpu_without_a_sort_or_a_loop_on_data(name):
    programs = compile_for_gpu.sample_programs(2048, 4)
    program = programs[f"sample[{name}, 4]"]
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


def test_sorts_of_the_vocabulary_are_found_and_small_ones_allowed():
    assert compile_for_gpu.wide_sorts(f"{SORT}\n{NARROW_SORT}\n{TOP_K}") == [
        SORT,
        TOP_K,
    ]


def test_loops_without_a_known_number_of_turns_are_found():
    assert compile_for_gpu.open_loops(f"{OPEN}\n{COUNTED}") == [OPEN]


def test_targets_lie_in_the_package():
    assert {path.stem for path in compile_for_gpu._TARGETS.glob("*.textproto")} == {
        "a100_80gb", "b200", "h100_sxm", "h200_sxm",
    }  # fmt: skip


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12",
)
def test_compiled_for_a_gpu_sampling_neither_sorts_nor_waits_for_the_host():
    done = subprocess.run(
        [sys.executable, "-m", "headrace.scripts.compile_for_gpu"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    programs = json.loads(done.stdout.splitlines()[-1])["programs"]
    rows_bytes = 32 * 128256 * 4
    for facts in programs.values():
        assert facts["temp_bytes"] < 5 * rows_bytes
