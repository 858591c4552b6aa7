"""bench_serving: a whole run in one process, its table, its line, its refusals."""

import asyncio
import json

import pytest
from absl import flags
from absl.testing import flagsaver

from headrace import LLM
from headrace.scripts import bench_serving, engine_flags, serving_report
from headrace.scripts.serving_run import Plan, measure
from headrace.scripts.serving_targets import EngineTarget, RequestFailed


@pytest.fixture
def bench():
    """bench(*arguments): runs the script; its flags are put back."""

    def run(*arguments):
        with flagsaver.flagsaver():
            own = flagsaver.save_flag_values(bench_serving.FLAGS)
            try:
                return bench_serving.main(["bench_serving", *arguments])
            finally:
                flagsaver.restore_flag_values(own, bench_serving.FLAGS)

    return run


@pytest.fixture
def built(tiny_llm, tiny_checkpoint, monkeypatch):
    """The script gets an engine of its own, which it closes."""
    config, made = tiny_llm.engine_config, []

    def build():
        made.append(LLM.from_checkpoint(tiny_checkpoint, config=config))
        return made[-1]

    monkeypatch.setattr(engine_flags, "build_llm", build)
    return made


def write(path, *rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


ROWS = [{"prompt_token_ids": [65, 900 + i], "max_tokens": 4 + i} for i in range(6)]


def test_a_run_prints_a_table_and_one_json_line_last(bench, built, tmp_path, capsys):
    path, out = write(tmp_path / "mine.jsonl", *ROWS), tmp_path / "runs.jsonl"
    arguments = [
        f"--workload={path}", "--max_concurrency=2", "--goodput=ttft:600000",
        f"--out={out}", f"--plots={tmp_path / 'plots'}", "--config=tiny",
    ]  # fmt: skip
    assert bench(*arguments) == 0
    text = capsys.readouterr().out
    line = json.loads(text.splitlines()[-1])
    assert (line["completed"], line["failed"], line["num_requests"]) == (6, 0, 6)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (12, 39)
    assert line["max_concurrent_requests"] == line["max_concurrency"] == 2
    assert (line["num_folded"], line["num_clipped"]) == (6, 0)
    assert line["request_goodput"] == line["request_throughput"] > 0
    assert (line["model"], line["request_rate"]) == ("tiny", "inf")
    assert 0 < line["slot_efficiency"] <= 2 / 12
    assert line["slot_efficiency"] < line["batch_efficiency"] <= 1
    assert line["peak_kv_usage_percent"] >= line["mean_kv_usage_percent"] >= 0
    assert line["max_late_ms"] is None
    for label in ("Successful requests:", "P99 TTFT (ms):", "Mean ITL (ms):",
                  "Median TPOT (ms):", "Total Token throughput (tok/s):",
                  "Slot efficiency:"):  # fmt: skip
        assert label in text
    assert "6 requests had ids outside the vocabulary" in text
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert json.loads(out.read_text()) == line
    assert len(built) == 1 and built[0].is_closed


def test_failed_requests_are_told_and_the_exit_code_is_1(
    bench, built, tmp_path, capsys
):
    # A text needs a tokenizer, which random weights have not.
    path = write(tmp_path / "w.jsonl", ROWS[0], {"prompt": "abc", "max_tokens": 3})
    assert bench(f"--workload={path}") == 1
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert (line["completed"], line["failed"]) == (1, 1)
    assert line["failed_by_reason"] == {"ValueError": 1}
    (told,) = [row for row in out.splitlines() if "1 failed: ValueError: " in row]
    assert "tokenizer" in told


def test_a_rerun_on_one_server_shows_its_prefix_hits(tiny_llm, tiny_checkpoint):
    """Measured by the engine's own counters, the warm-up's lookups left out."""

    async def main():
        config = tiny_llm.engine_config
        llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
        target = EngineTarget(llm, model="tiny")
        plan = Plan(workload="33:2", num_requests=3, num_warmups=2)
        lines = [(await measure(target, plan))[1] for _ in range(2)]
        await target.close()
        return lines

    first, second = asyncio.run(main())
    # Two of the three pages of 16 that a prompt of 33 begins, 32 of 33 tokens.
    assert first["prefix_hit_percent"] == 0
    assert second["prefix_hit_percent"] == pytest.approx(100 * 32 / 33, abs=1e-3)
    assert first["total_input_tokens"] == second["total_input_tokens"] == 99
    (told,) = [r for r in serving_report.remarks(second, {}) if "cached" in r]
    assert "97.0 % of prompt tokens were cached" in told


def test_recorded_times_are_replayed_unless_a_rate_is_given(tmp_path):
    rows = [row | {"arrival_s": 7.0 + i} for i, row in enumerate(ROWS)]
    path = write(tmp_path / "w.jsonl", *rows)

    def arrivals(**options):
        plan = Plan(**options)
        return plan.arrivals(plan.items(512))

    assert arrivals(workload=path) == [0, 1, 2, 3, 4, 5]
    assert arrivals(trace=path, num_requests=2) == [0, 1]
    assert arrivals(workload=path, request_rate=float("inf")) == [0] * 6
    poisson = arrivals(workload=path, request_rate=5.0)
    assert poisson[0] == 0 < poisson[1] and poisson != [0, 1, 2, 3, 4, 5]
    assert poisson != arrivals(workload=path, request_rate=5.0, workload_seed=1)
    assert arrivals(workload="8:8", num_requests=3) == [0] * 3
    at_once = Plan(workload="offline")  # a file whose times are all 0
    assert not at_once.is_replayed(at_once.items(512))
    with pytest.raises(ValueError, match="request 1 of the trace has no time"):
        arrivals(trace=write(tmp_path / "t.jsonl", rows[0], ROWS[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload=nothing"], "got 'nothing'"),
        (["--workload=0:3"], "at least 1, got '0:3'"),
        (["--request_rate=0"], "request_rate must be above 0 (or inf), got 0.0"),
        (["--request_rate=1", "--burstiness=0"], "burstiness must be above 0"),
        (["--max_concurrency=0"], "max_concurrency"),
        (["--goodput=ttft"], "goodput must be name:milliseconds"),
        (["--range_ratio=1"], "range_ratio must be in [0, 1), got 1.0"),
        (["--vocab_size=0"], "vocab_size must be at least 1, got 0"),
        (["--trace=online.jsonl", "--request_rate=2"], "trace and request_rate"),
        (["--trace=/nowhere/t.jsonl"], "t.jsonl"),
        (["--target=a:1", "--http=http://a"], "target and http"),
        (["--http=a:1"], "http must be http://"),
        (["online"], "only flags are taken, got ['online']"),
        (["--no_such_flag=1"], "no_such_flag"),
    ],
)
def test_wrong_flags_are_one_line_before_an_engine_is_built(
    bench, built, capsys, arguments, message
):
    assert bench(*arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert built == [] and captured.out == ""


def test_a_server_that_is_not_there_is_one_line(bench, capsys):
    assert bench("--target=127.0.0.1:9", "--num_requests=2") == 1
    assert bench("--http=http://127.0.0.1:9", "--num_requests=2") == 1
    assert capsys.readouterr().err.count("error: the server does not answer") == 2


def test_a_failed_warm_up_ends_the_run(bench, built, capsys, monkeypatch):
    async def fail(self, item):
        raise RequestFailed("HTTP 503", "busy")
        yield

    monkeypatch.setattr(bench_serving.EngineTarget, "stream", fail)
    assert bench("--workload=8:8", "--num_requests=2") == 1
    assert "a warm-up request failed: HTTP 503: busy" in capsys.readouterr().err


def test_flags_reach_the_target(monkeypatch):
    seen = {}

    class Fake:
        def __init__(self, where, **options):
            seen[where] = options

    monkeypatch.setattr(bench_serving, "GrpcTarget", Fake)
    monkeypatch.setattr(bench_serving, "HttpTarget", Fake)
    monkeypatch.setenv("HEADRACE_KEY", "from-env")
    for arguments in (
        ["--target=a:1", "--key=k", "--tls_ca=ca.pem", "--noignore_eos"],
        ["--target=b:1"],
        ["--target=c:1", "--tls"],
        ["--http=http://d", "--http_model=m", "--metrics_url=http://e"],
    ):
        own = flagsaver.save_flag_values(bench_serving.FLAGS)
        bench_serving.FLAGS(["bench_serving", *arguments])
        bench_serving.make_target()
        flagsaver.restore_flag_values(own, bench_serving.FLAGS)
    assert seen["a:1"]["tls"].ca == "ca.pem" and seen["a:1"]["key"] == "k"
    assert seen["a:1"]["ignore_eos"] is False
    assert seen["b:1"]["tls"] is None and seen["b:1"]["key"] == "from-env"
    assert seen["c:1"]["tls"].ca is None
    assert seen["http://d"]["model"] == "m" and seen["http://d"]["ignore_eos"]
    assert seen["http://d"]["metrics_url"] == "http://e"


def test_every_plan_field_is_a_flag_of_the_same_default():
    with flagsaver.flagsaver():
        bench_serving.FLAGS(["bench_serving"])
        assert bench_serving.make_plan() == Plan()


def test_help_lists_the_engines_flags_too(bench, capsys):
    assert bench("--help") == 0
    out = capsys.readouterr().out
    assert "--burstiness" in out and "--weights_seed" in out
    assert flags.FLAGS["num_slots"] is bench_serving.FLAGS["num_slots"]


def test_unknown_server_numbers_are_said_to_be_unknown():
    line = dict.fromkeys(serving_report._SERVER.values())
    line |= dict.fromkeys(serving_report._COUNTS.values())
    for name in serving_report._LATENCIES:
        keys = ("mean", "median", "std", "p50", "p95", "p99")
        line |= {f"{key}_{name}_ms": None for key in keys}
    text = serving_report.table(line | {"workload": "x", "failed": 0})
    assert text.count("not known") == len(serving_report._SERVER)
    assert all(len(row) == serving_report.WIDTH for row in text.splitlines())
