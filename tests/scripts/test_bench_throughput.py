"""bench_throughput: what it runs, which fields it prints, and what it refuses."""

import json

import pytest

from headrace.scripts import bench_throughput
from headrace.scripts.bench_throughput import load_workload, report, run_workload

# The fields that the runners of other engines print, in their order.
SHARED_FIELDS = [
    "engine", "version", "model", "dtype", "workload", "n_requests", "prompt_tokens",
    "output_tokens", "wall_s", "output_tok_per_s", "total_tok_per_s", "ttft_ms_p50",
    "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "peak_rss_mb", "load_s",
    "loadavg_before", "own_cores_busy", "other_cores_busy",
]  # fmt: skip


def write_workload(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


ROWS = [
    {"id": "0", "prompt_token_ids": [65, 600, 67], "max_tokens": 5},
    {"id": "1", "prompt_token_ids": [68, 69], "max_tokens": 7, "arrival_s": 0.0},
]


def test_json_line_has_the_shared_fields_and_the_right_counts(
    fake_llm, run_main, tmp_path, capsys
):
    path = write_workload(tmp_path / "mine.jsonl", ROWS)
    assert run_main(bench_throughput, f"--workload={path}", "--model=/a/b/") == 0
    lines = capsys.readouterr().out.splitlines()
    line = json.loads(lines[-1])
    assert list(line)[: len(SHARED_FIELDS)] == SHARED_FIELDS
    assert list(line)[len(SHARED_FIELDS) :] == [
        "threads", "slots", "policy", "numerics",
    ]  # fmt: skip
    assert (line["engine"], line["model"], line["workload"]) == (
        "headrace",
        "b",
        "mine",
    )
    assert (line["n_requests"], line["prompt_tokens"]) == (2, 5)
    assert line["output_tokens"] == 12
    assert (line["slots"], line["policy"], line["dtype"]) == (12, "fcfs", "float32")
    assert line["tpot_ms_p50"] == pytest.approx(2.0)
    assert "wall_s" in lines[0] and "mine" in lines[1]


def test_requests_are_greedy_and_run_to_their_length_after_one_warm_up(
    fake_llm, run_main, tmp_path
):
    path = write_workload(tmp_path / "mine.jsonl", ROWS)
    assert run_main(bench_throughput, f"--workload={path}") == 0
    warm, first, second = fake_llm.calls
    assert (len(warm[0]), warm[1].max_tokens) == (64, 4)
    assert (first[0], second[0]) == ([65, 600, 67], [68, 69])
    assert (first[1].max_tokens, second[1].max_tokens) == (5, 7)
    for _, params in (warm, first, second):
        assert params.temperature == 0 and params.ignore_eos
        assert not params.detokenize


def test_random_weights_get_ids_within_their_vocabulary(fake_llm, run_main, tmp_path):
    fake_llm.tokenizer = None
    path = write_workload(tmp_path / "mine.jsonl", ROWS)
    assert run_main(bench_throughput, f"--workload={path}", "--config=tiny") == 0
    assert fake_llm.calls[1][0] == [65, 88, 67]


def test_latency_starts_a_request_when_the_one_before_has_ended(fake_llm, tmp_path):
    for name, is_alone in (("latency", True), ("offline", False)):
        path = write_workload(tmp_path / f"{name}.jsonl", ROWS)
        workload = load_workload(path)
        assert workload.is_one_by_one == is_alone
        run = run_workload(fake_llm, workload)
        assert (run.starts_s[0] < run.starts_s[1]) == is_alone


def test_time_to_first_token_counts_from_the_given_start(fake_llm, tmp_path):
    workload = load_workload(write_workload(tmp_path / "offline.jsonl", ROWS))
    run = run_workload(fake_llm, workload)
    for place, ms in enumerate((10.0, 30.0)):
        run.starts_s[place] = run.outputs[place].metrics.first_token_s - ms / 1e3
    facts = dict(engine="e", version="v", model="m", dtype="d", load_s=1.234)
    line = report(run, workload, facts)
    assert line["ttft_ms_p50"] == pytest.approx(20.0)
    assert line["ttft_ms_p99"] == pytest.approx(29.8)
    assert line["load_s"] == 1.23


def test_short_output_is_a_failure(fake_llm, run_main, tmp_path, capsys, monkeypatch):
    answer = fake_llm._answer

    def lose_a_token(prompt, params):
        output = answer(prompt, params)
        output.outputs[0].token_ids.pop()
        return output

    monkeypatch.setattr(fake_llm, "_answer", lose_a_token)
    path = write_workload(tmp_path / "mine.jsonl", ROWS)
    assert run_main(bench_throughput, f"--workload={path}") == 1
    assert "gave 4 tokens instead of 5" in capsys.readouterr().err


def test_limit_takes_the_first_requests():
    assert len(load_workload("offline").prompts) == 64
    assert len(load_workload("offline", limit=3).prompts) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--workload=online"], "'online' has arrival times"),
        (["--workload=nothing"], "one of ['latency', 'long', 'offline'"),
        (["--workload=/nowhere/x.jsonl"], "x.jsonl"),
        (["--workload=latency", "offline"], "unknown arguments ['offline']"),
        (["--workload=long"], "max_context_len is 512"),
    ],
)
def test_refusal_is_one_line_and_exit_code_one(
    fake_llm, run_main, capsys, arguments, message
):
    assert run_main(bench_throughput, *arguments) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert fake_llm.calls == []
