"""The preflight: the same numbers as a start, floors by hand, and its refusals."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from headrace import LLM
from headrace.configs import EngineConfig, load_config, parse_config
from headrace.engine import device_facts as device_facts_module
from headrace.engine import llm as llm_module
from headrace.engine import sizing, weight_sizes
from headrace.engine.sizing import DeviceFacts
from headrace.scripts import engine_flags, gpu_compile, preflight
from headrace.scripts.preflight_model import (
    DENSE_FLOPS,
    Floors,
    full_target_name,
    gpu_facts,
)

PLUGINS = "jax_cuda12_plugin", "jax_cuda13_plugin"
HAS_COMPILER = any(importlib.util.find_spec(name) for name in PLUGINS)
LLAMA_8B = parse_config(load_config("llama3_1_8b"))[0]
# Weights that multiply: of all layers, of the head.
BODY, HEAD = 32 * 4096 * (6144 + 4096 + 3 * 14336), 128256 * 4096


@pytest.fixture
def fly(run_main, monkeypatch, capsys):
    """Runs the script: arguments -> exit code, lines, errors."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the script sets
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)

    def run(*arguments):
        code = run_main(preflight, *arguments)
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def _run_alone(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "headrace.scripts.preflight", *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def _nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_preflight_and_a_start_agree_to_the_byte(
    fly, tiny_config, tiny_checkpoint, monkeypatch, tmp_path
):
    """Pool limited by memory, pages moving to the host, everything compiled twice."""
    model, config = tiny_config
    config = dataclasses.replace(
        config, num_pages=None, scoring=True, max_logprobs=-1, numerics="fast",
        host_kv_bytes=10**6,
    )  # fmt: skip
    facts = DeviceFacts(platform="cpu", free_bytes=64 * 10**6)
    monkeypatch.setattr(llm_module, "device_facts", lambda _: facts)
    monkeypatch.setattr(device_facts_module, "device_facts", lambda: facts)
    monkeypatch.setattr(engine_flags, "engine_settings", lambda: (model, config))
    plans = []
    real = sizing.check_compiled
    monkeypatch.setattr(
        sizing, "check_compiled", lambda *args: plans.append(real(*args))
    )
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config, cache_dir=tmp_path)
    try:
        code, lines, _ = fly("--config=tiny", "--target=cpu", "--lengths=100:28")
        assert code == 0
        said = json.loads(lines[-1])
        runner, start = llm._runner, llm._runner.config
        for name in (
            "num_pages", "num_slots", "max_context_len", "page_size", "host_kv_bytes",
            "memory_fraction", "param_dtype", "kv_dtype",
        ):  # fmt: skip
            assert said[name] == getattr(start, name), name
        assert 33 < said["num_pages"] < 12 * 32 + 1
        assert said["decode_batch_sizes"] == list(start.decode_batch_sizes)
        assert said["prefill_shapes"] == [list(s) for s in start.prefill_shapes]
        temps = {n: p["temp_bytes"] for n, p in said["programs"].items()}
        entries = llm.ledger.entries
        assert temps == {name: entries[name].temp_bytes for name in entries}
        plan = said["memory"]
        assert plan["weights_bytes"] == _nbytes(runner.params)
        assert plan["pool_bytes"] == _nbytes(runner.kv_cache)
        state = runner.logits_BQV, runner.slots, runner.extras, runner._no_mask
        assert plan["state_bytes"] == _nbytes(state)
        assert plan["temp_bytes"] == max(temps.values())
        assert plan["are_temps_compiled"]
        (checked,) = plans
        assert {name: plan[name] for name in dataclasses.asdict(checked)} == (
            dataclasses.asdict(checked)
        )
        assert said["lengths"][0]["requests"] == min(12, (said["num_pages"] - 1) // 8)
    finally:
        llm.close()


def test_8b_fits_an_h200_with_the_numbers_of_its_start(fly):
    code, lines, err = fly(
        "--config=llama3_1_8b", "--target=h200", "--nocompile",
        "--lengths=8192:512,1024:256",
    )  # fmt: skip
    assert code == 0 and err == ""
    assert "temporaries are estimated: --nocompile" in lines
    said = json.loads(lines[-1])
    facts = DeviceFacts(
        platform="gpu",
        free_bytes=151_397_597_184 * 3 // 4,
        host_free_bytes=10**12,
        capability=(9, 0),
    )
    config = sizing.resolve(LLAMA_8B, EngineConfig(), facts)
    assert said["target"] == "h200_sxm"
    assert said["memory"]["free_bytes"] == facts.free_bytes
    assert (said["num_pages"], said["num_slots"]) == (config.num_pages, 256)
    assert said["memory"]["weights_bytes"] == 16_060_522_496
    assert said["memory"]["left_bytes"] >= 0
    long, short = said["lengths"]
    assert (long["pages"], short["pages"]) == (136, 20)
    assert long["requests"] == (config.num_pages - 1) // 136
    assert short["requests"] == 256
    assert {p["compile_s"] for p in said["programs"].values()} == {None}
    decode = said["programs"]["decode[128]"]
    weights = 2 * (8_030_261_248 - HEAD + 128 * 4096)
    kv = 128 * 1024 * 131_072
    assert (decode["weight_bytes"], decode["kv_bytes"]) == (weights, kv)
    assert decode["model_itl_ms"] == pytest.approx(1e3 * (weights + kv) / 4.8e12)
    assert "model ITL ms" in "\n".join(lines) and "no GPU ran" in "\n".join(lines)


def test_70b_on_one_h200_is_refused_with_the_numbers(fly):
    code, _, err = fly("--config=llama3_3_70b", "--target=h200", "--nocompile")
    assert code == 1
    for words in (
        "weights 141,107,412,992",
        "of 99,922,414,141 bytes, memory_fraction 0.88 of 113,548,197,888 free",
        "weights alone need 2 such devices, and sharding is not there yet",
    ):
        assert words in err


def test_what_a_refusal_offers_is_taken(fly, monkeypatch):
    """4,000 slots of logits and splits do not fit an A100; what is named does."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    arguments = "--config=llama3_1_8b", "--target=a100", "--nocompile"
    code, _, err = fly(*arguments, "--num_slots=4000")
    offer = re.search(r"lower num_slots to (\d+), or raise memory_fraction", err)
    assert code == 1 and offer
    slots = int(offer[1])
    assert fly(*arguments, f"--num_slots={slots}")[0] == 0
    code, _, err = fly(*arguments, f"--num_slots={slots + 1}")
    offer = re.search(r"lower max_context_len to (\d+) or lower num_slots", err)
    assert code == 1 and offer
    more = [*arguments, f"--num_slots={slots + 1}"]
    assert fly(*more, f"--max_context_len={offer[1]}")[0] == 0
    assert fly(*more, f"--max_context_len={int(offer[1]) + 1}")[0] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_gpus=2"], "--num_gpus=2: one GPU so far; more come with sharding"),
        (["--quant=int3"], "quantization must be such as int8"),
        (["--quant=int4-g96"], "group size 96 of scheme 'int4-g96' does not divide"),
        (["--model=x"], "preflight takes --config"),
        (["--target=h"], "target 'h'"),
        (["--target=tpu"], "target 'tpu'"),
        (["--target="], "['a100_80gb', 'b200', 'h100_sxm', 'h200_sxm']"),
        (["--lengths=9"], "lengths wants prompt:output in tokens, got '9'"),
        (["--lengths=0:9"], "got '0:9'"),
        (["--lengths=500:13"], "513 tokens are more than max_context_len 512"),
    ],
)
def test_flags_that_cannot_be_heeded_are_refused(fly, flags, message):
    code, _, err = fly("--config=tiny", "--target=h200", "--nocompile", *flags)
    assert code == 1 and message in err


def test_the_beginning_of_a_targets_name_will_do():
    names = gpu_compile.target_names()
    for short in ("a100", "b200", "h100", "h200"):
        assert full_target_name(short).startswith(short)
    assert [full_target_name(name) for name in names] == names
    assert sorted(DENSE_FLOPS) == names


def test_what_is_free_on_a_target_is_the_share_that_xla_takes(monkeypatch):
    target = gpu_compile.read_target("h100_sxm")
    card = 84_942_979_072
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    facts = gpu_facts(target)
    assert (facts.free_bytes, facts.attention) == (card * 3 // 4, "kernels")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert gpu_facts(target).free_bytes == card // 2
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.5")
    with pytest.raises(ValueError, match="share in .0, 1., got 1.5"):
        gpu_facts(target)
    b200 = gpu_compile.read_target("b200")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert gpu_facts(b200).attention == "xla"


@pytest.fixture
def floors():
    config = dataclasses.replace(
        EngineConfig(prefill_shapes=((1, 512), (1, 2048))),
        param_dtype="bfloat16",
        kv_dtype="bfloat16",
    )
    return Floors(model=LLAMA_8B, config=config, bytes_per_s=4.8e12, flops_per_s=989e12)


def test_decode_floor_is_bytes_until_the_products_take_longer(floors):
    def read(rows):
        return 2 * (weight_sizes.num_params(LLAMA_8B) - HEAD + rows * 4096)

    assert floors.decode_ms(1, 0) == pytest.approx(1e3 * read(1) / 4.8e12)
    assert floors.decode_ms(1, 0) == pytest.approx(3.13, abs=0.01)
    pairs = 4 * 32 * 32 * 128
    flops = 4096 * (2 * (BODY + HEAD) + 10 * pairs)
    assert floors.decode_ms(4096, 10) == pytest.approx(1e3 * flops / 989e12)


def test_prompt_floor_adds_its_chunks(floors):
    """2,048 tokens take 30 ms by the published figures; 5,000 are three chunks."""
    pairs = 4 * 32 * 32 * 128

    def ms(tokens, start):
        done = 2 * BODY * tokens + pairs * tokens * (start + tokens / 2) + 2 * HEAD
        return 1e3 * done / 989e12

    assert floors.prefill_ms(1, 2048) == pytest.approx(ms(2048, 0))
    assert floors.prefill_ms(1, 2048) == pytest.approx(30.0, abs=0.1)
    assert floors.prompt_ms(5000) == pytest.approx(
        ms(2048, 0) + ms(2048, 2048) + ms(904, 4096)
    )
    # A short prompt waits for the weights.
    read = 2 * (weight_sizes.num_params(LLAMA_8B) - HEAD + 16 * 4096)
    assert floors.prompt_ms(16) == pytest.approx(1e3 * (read + 16 * 131_072) / 4.8e12)


def test_a_cpu_has_no_model_of_time(floors):
    unknown = dataclasses.replace(floors, bytes_per_s=None, flops_per_s=None)
    assert unknown.decode_ms(1, 1) is unknown.prompt_ms(5000) is None


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler for GPUs is installed")
def test_without_a_compiler_for_gpus_the_plan_is_printed_with_estimates():
    done = _run_alone("--config=tiny", "--target=h200")
    assert done.returncode == 0, done.stderr
    assert "temporaries are estimated: no compiler for GPUs here; pip" in done.stdout
    assert not json.loads(done.stdout.splitlines()[-1])["memory"]["are_temps_compiled"]


@pytest.mark.skipif(not HAS_COMPILER, reason="needs what gpu_compile.py lists")
def test_compiled_for_a_gpu_no_program_takes_more_than_its_estimate():
    done = _run_alone("--config=tiny", "--target=h200", "--num_slots=8")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    guessed = json.loads(
        _run_alone(
            "--config=tiny", "--target=h200", "--num_slots=8", "--nocompile"
        ).stdout.splitlines()[-1]
    )
    assert said["memory"]["are_temps_compiled"]
    for name, program in guessed["programs"].items():
        assert said["programs"][name]["temp_bytes"] <= program["temp_bytes"], name
