"""The scripts on a real engine: two layers and random weights."""

import json

import pytest

from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import bench_throughput, engine_flags, generate

IDS = [5, 6, 7, 8]


@pytest.fixture
def built(tiny_llm, monkeypatch):
    monkeypatch.setattr(engine_flags, "build_llm", lambda: tiny_llm)


@pytest.mark.usefixtures("built")
def test_prompt_of_ids_gives_the_same_ids_alone_and_in_a_file(
    run_main, tmp_path, capsys
):
    common = ["--max_tokens=6", "--ignore_eos"]
    assert run_main(generate, *common, "5 6 7 8") == 0
    alone = [int(word) for word in capsys.readouterr().out.split()]
    assert len(alone) == 6
    rows = [{"prompt_token_ids": ids} for ids in ([9] * 40, IDS, [900], [1, 2])]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run_main(generate, *common, f"--prompts_file={path}") == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results[1]["token_ids"] == alone
    assert [r["finish_reason"] for r in results] == [
        "length", "length", "error", "length",
    ]  # fmt: skip
    assert "[0, 511]" in results[2]["error"]


@pytest.mark.usefixtures("built")
def test_row_of_a_file_equals_what_generate_gives(run_main, tiny_llm, tmp_path, capsys):
    values = dict(max_tokens=9, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    rows = [{"prompt_token_ids": ids} | values for ids in ([9] * 40, IDS)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run_main(generate, f"--prompts_file={path}") == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    prompts, params = (
        [row["prompt_token_ids"] for row in rows],
        SamplingParams(**values),
    )
    outputs = tiny_llm.generate(prompts, params, use_tqdm=False)
    for result, output in zip(results, outputs, strict=True):
        one = output.outputs[0]
        assert result["token_ids"] == one.token_ids and len(one.token_ids) == 9
        assert result["cumulative_logprob"] == one.cumulative_logprob
        assert [list(map(int, step)) for step in result["logprobs"]] == [
            list(step) for step in one.logprobs
        ]
        assert (result["seed"], result["finish_reason"]) == (3, "length")
        assert result["num_prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.usefixtures("built")
def test_prompt_longer_than_the_context_is_refused_in_one_line(run_main, capsys):
    assert run_main(generate, "5 " * 600) == 1
    err = capsys.readouterr().err
    assert "at most 511 tokens" in err and err.count("\n") == 1


@pytest.mark.usefixtures("built")
def test_benchmark_counts_every_token(run_main, tmp_path, capsys):
    rows = [{"prompt_token_ids": [600 + i] * 9, "max_tokens": 3 + i} for i in range(12)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run_main(bench_throughput, f"--workload={path}", "--config=tiny") == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["prompt_tokens"], line["output_tokens"]) == (108, sum(range(3, 15)))
    assert (line["model"], line["slots"]) == ("tiny-random-weights", 12)
    assert 0 < line["ttft_ms_p50"] <= line["wall_s"] * 1e3
    assert line["peak_rss_mb"] > 50 and line["own_cores_busy"] > 0


def test_row_of_a_file_may_have_a_grammar_and_a_scored_prompt(
    run_main, monkeypatch, text_llm, tmp_path, capsys
):
    monkeypatch.setattr(engine_flags, "build_llm", lambda: text_llm)
    rows = [
        {"prompt": "ab", "structured_outputs": {"regex": "x{3}"}, "prompt_logprobs": 1},
        {"prompt": "ab", "structured_outputs": {"regex": "y{2}"}, "bad_words": ["yy"]},
        {"prompt": "c", "output_kind": "cumulative", "logprobs": 0},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    run_main(generate, "--max_tokens=6", "--raw", f"--prompts_file={path}")
    shaped, stuck, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert (shaped["text"], shaped["finish_reason"]) == ("xxx", "stop")
    ids = text_llm.tokenizer.encode("ab")
    assert len(shaped["prompt_logprobs"]) == len(ids)
    assert (stuck["text"], stuck["finish_reason"]) == ("y", "error")
    assert "together forbid" in stuck["finish_message"]
    assert len(whole["token_ids"]) == len(whole["logprobs"]) == 6
