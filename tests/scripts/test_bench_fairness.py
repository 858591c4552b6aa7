"""What a flood does to others: the load is fixed, all of it is measured. No times."""

import json

import numpy as np
import pytest
from absl.testing import flagsaver

from headrace.scripts import bench_fairness
from headrace.scripts.bench_fairness import plan, ttft_row


def test_every_request_of_both_phases_is_measured(capsys):
    if not bench_fairness.FLAGS.is_parsed():
        bench_fairness.FLAGS(["bench_fairness"])
    values = dict(phase_s=1.0, fair_step_ms=2.0, flood_calls=12, fair_slots=4)
    with flagsaver.flagsaver(**values, flood_output=40, fair_check=False):
        assert bench_fairness.main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = len(plan(4, 2.0, 1.0))
    assert [one["phase"] for one in line["phases"]] == ["alone", "flooded"]
    assert [one["requests"] for one in line["phases"]] == [expected, expected]
    assert line["policy"] == "fair" and line["refused"] == 0
    assert line["p99_ratio"] > 0


def test_the_plan_is_the_same_each_time_and_each_tenant_keeps_its_rate():
    planned = plan(3, 4.0, 100.0)
    assert planned == plan(3, 4.0, 100.0) != plan(3, 4.0, 100.0, seed=2)
    for number in range(3):
        times_s = [one.at_s for one in planned if one.tenant == f"good-{number}"]
        assert times_s == sorted(times_s) and 0 < times_s[0] and times_s[-1] < 100
        assert len(times_s) == pytest.approx(400, rel=0.15)
        assert np.diff(times_s).std() == pytest.approx(0.25, rel=0.15)


def test_percentiles_are_in_milliseconds():
    found = ttft_row("alone", [0.001 * i for i in range(1, 102)])
    assert found == {
        "phase": "alone",
        "requests": 101,
        "p50_ttft_ms": 51.0,
        "p95_ttft_ms": 96.0,
        "p99_ttft_ms": 100.0,
        "max_ttft_ms": 101.0,
    }


def test_a_phase_in_which_nobody_was_served_has_no_percentiles():
    found = ttft_row("flooded", [])
    assert (found["requests"], found["p99_ttft_ms"], found["max_ttft_ms"]) == (
        0, None, None,
    )  # fmt: skip
