"""bench_speculation on the two-layer model: its figures add up, and it can fail."""

import json

import pytest
from absl.testing import flagsaver

from headrace.scripts import bench_speculation as bench


@pytest.fixture
def run(capsys):
    """Runs the script in this process: (exit code, printed facts, errors)."""

    def whole(**values):
        if not bench.FLAGS.is_parsed():
            bench.FLAGS(["bench_speculation"])
        with flagsaver.flagsaver(config="tiny", num_rounds=2, num_copies=4, **values):
            code = bench.main(["bench_speculation"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out.splitlines()[-1]), printed.err

    return whole


def test_figures_add_up(run):
    code, facts, _ = run(adapts_drafts=False, num_slots=8)
    assert code == 0 and facts["draft"] == "prompt-lookup"
    assert [line["workload"] for line in facts["workloads"]] == ["copy", "offline"]
    for line in facts["workloads"]:
        assert line["same_tokens"] and line["drafted_steps"] == 1
        given = (line["tokens"] - line["requests"]) / line["passes"]
        assert line["tokens_per_pass"] == pytest.approx(given, rel=0.02)
        assert line["tokens_per_pass"] >= 1 and 0 <= line["accepted"] <= 1


def test_other_tokens_fail_it(run, monkeypatch):
    real = bench.run

    def altered(llm, requests):
        seconds, tokens = real(llm, requests)
        if llm.engine_config.draft:
            tokens[0][0] += 1
        return seconds, tokens

    monkeypatch.setattr(bench, "run", altered)
    code, facts, errors = run(num_slots=8)
    assert code == 1 and "changed tokens" in errors
    assert not facts["workloads"][0]["same_tokens"]
