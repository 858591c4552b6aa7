"""What serving costs: every way is measured, what is missed is told. No times."""

import json

import pytest
from absl.testing import flagsaver

from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import bench_wrapper
from headrace.scripts.bench_wrapper import Turn, misses, row
from headrace.scripts.fixed_step import fixed_step_llm
from headrace.scripts.wrapper_client import Measured


def test_every_way_gives_all_tokens_and_one_line_of_json(capsys):
    if not bench_wrapper.FLAGS.is_parsed():
        bench_wrapper.FLAGS(["bench_wrapper"])
    values = dict(step_ms=1.0, streams=3, stream_tokens=20, probes=2, turns=1)
    with flagsaver.flagsaver(**values, check=False):
        assert bench_wrapper.main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["way"] for one in line["ways"]] == ["engine", "grpc", "http"]
    for one in line["ways"]:
        assert one["tokens_per_s"] > 0 and one["tokens_per_piece"] >= 1
        assert one["ttft_ms"] >= 1
    assert line["ways"][0]["loss_percent"] == 0 == line["ways"][0]["own_ttft_ms"]
    assert line["streams"] == 3 and "missed" in line


def _turn(seconds, ttft_s, empty_s=0.0):
    measured = Measured(
        tokens=100, pieces=50, seconds=seconds, ttft_s=[ttft_s], empty_s=[empty_s]
    )
    return Turn(measured=measured, cpu_s=0.01)


def test_a_way_is_told_against_the_engine():
    engine = [_turn(1.0, 0.020), _turn(1.0, 0.021), _turn(4.0, 0.022)]
    found = row("grpc", [_turn(1.25, 0.026, 0.003)] * 3, engine)
    assert found == {
        "way": "grpc",
        "tokens_per_s": 80.0,
        "loss_percent": 20.0,
        "ttft_ms": 26.0,
        "added_ttft_ms": 5.0,
        "empty_call_ms": 3.0,
        "own_ttft_ms": 2.0,
        "cpu_us_per_token": 100.0,
        "tokens_per_piece": 2.0,
    }
    assert misses([found]) == [
        "grpc: 20.0 % off the engine",
        "grpc: 2.0 ms added to TTFT",
    ]
    assert misses([found | {"loss_percent": 4.9, "own_ttft_ms": 1.9}]) == []


def test_the_clock_gives_letters_and_takes_its_time():
    llm = fixed_step_llm(0.002)
    params = SamplingParams(temperature=0, max_tokens=28)
    outputs = llm.generate(["Any text at all", "{}"], params, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].text == "bcdefghijklmnopqrstuvwxyzabc"
        assert output.outputs[0].finish_reason == "length"
        times = output.metrics
        # 27 steps after the first, and never one before its time.
        assert times.finished_s - times.first_token_s >= 26 * 0.002
    assert outputs[1].prompt_token_ids == (ord("{"), ord("}"))
    assert llm.stats()["gauges"]["kv_cache_usage_perc"] == 0


def test_a_step_without_time_is_refused():
    with pytest.raises(ValueError, match="step_s must be above 0, got 0"):
        fixed_step_llm(0)
