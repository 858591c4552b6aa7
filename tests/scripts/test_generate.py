"""generate: where prompts come from, what is printed, and how it refuses."""

import io
import json

import pytest

from headrace.scripts import generate


class Terminal(io.StringIO):
    """Input lines of a user at a terminal."""

    def isatty(self):
        return True


def test_words_are_sent_as_a_chat_message_and_the_text_is_printed(
    fake_llm, run_main, capsys
):
    assert run_main(generate, "why", "so") == 0
    assert capsys.readouterr().out == "<USER>WHY SO<ASSISTANT>\n"
    (text, params) = fake_llm.calls[0]
    assert text == "<user>why so<assistant>"
    assert (params.temperature, params.max_tokens) == (0.0, 256)


def test_raw_prompt_leaves_the_template_out(fake_llm, run_main, capsys):
    assert run_main(generate, "--raw", "--prompt=why", "--nostream") == 0
    assert capsys.readouterr().out == "WHY\n"


def test_model_without_a_template_completes_the_bare_prompt(fake_llm, run_main, capsys):
    fake_llm.tokenizer.chat_template = None
    assert run_main(generate, "why") == 0
    assert capsys.readouterr().out == "WHY\n"
    assert run_main(generate, "--chat=why") == 1
    assert "no chat template" in capsys.readouterr().err


def test_system_message_comes_first(fake_llm, run_main):
    assert run_main(generate, "--system=be brief", "--chat=why") == 0
    assert fake_llm.calls[0][0] == "<system>be brief<user>why<assistant>"


def test_model_without_a_tokenizer_takes_ids_and_prints_ids(fake_llm, run_main, capsys):
    fake_llm.tokenizer = None
    assert run_main(generate, "5, 6 7") == 0
    assert capsys.readouterr().out == "5 6 7 \n"
    assert run_main(generate, "five six") == 1
    assert "token ids such as '5 6 7', got 'five six'" in capsys.readouterr().err


def test_sampling_flags_reach_the_engine(fake_llm, run_main):
    flags = ["--max_tokens=3", "--temperature=0.7", "--top_p=0.9", "--top_k=5"]
    assert run_main(generate, *flags, "--seed=11", "--ignore_eos", "x") == 0
    params = fake_llm.calls[0][1]
    assert (params.max_tokens, params.temperature, params.top_p) == (3, 0.7, 0.9)
    assert (params.top_k, params.seed, params.ignore_eos) == (5, 11, True)


def test_logprobs_are_printed_after_the_text(fake_llm, run_main, capsys):
    assert run_main(generate, "--raw", "--logprobs=1", "hi") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "HI"
    assert out[1].split() == ["*", "72", "-0.5000", "1", "'H'"]
    assert out[2].split() == ["*", "73", "-0.5000", "1", "'I'"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--temperature=-1", "x"], "temperature must be 0 or in"),
        (["--top_p=0", "x"], r"top_p must be in (0, 1], got 0.0"),
        (["--prompt=a", "b"], "one source of prompts, got ['prompt', 'words']"),
        (["--raw", "--chat=x"], "--raw leaves the chat template out"),
        (["--out=o.jsonl", "x"], "--out holds the results of --prompts_file"),
        (["--prompts_file=nowhere.jsonl"], "nowhere.jsonl"),
        ([f"--prompts_file={__file__}", "--out="], "the name of a file, got ''"),
        (["--prompt="], "no prompt: give one"),
        (["--raw", "--prompt="], "no prompt: give one"),
        (["--chat="], "no prompt: give one"),
        ([""], "no prompt: give one"),
    ],
)
def test_refusal_is_one_line_and_exit_code_one(
    fake_llm, run_main, capsys, arguments, message
):
    assert run_main(generate, *arguments) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_piped_input_is_the_prompt(fake_llm, run_main, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert run_main(generate, "--raw") == 0
    assert fake_llm.calls[0][0] == "from a pipe"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run_main(generate) == 1


def test_chat_at_a_terminal_remembers_the_conversation(
    fake_llm, run_main, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", Terminal("one\n\ntwo\n"))
    assert run_main(generate, "--max_tokens=4") == 0
    assert [text for text, _ in fake_llm.calls] == [
        "<user>one<assistant>",
        "<user>one<assistant><USE<user>two<assistant>",
    ]


def test_refused_turn_does_not_end_the_chat(fake_llm, run_main, monkeypatch, capsys):
    fake_llm.tokenizer = None
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n5 6\n"))
    assert run_main(generate, "--interactive") == 0
    captured = capsys.readouterr()
    assert "error: this model has no tokenizer" in captured.err
    assert "5 6 \n" in captured.out


def test_ledger_is_shown_when_asked_for(fake_llm, run_main, capsys):
    assert run_main(generate, "--verbosity=1", "x") == 0
    assert "the ledger\n" in capsys.readouterr().err
    assert run_main(generate, "x") == 0
    assert "ledger" not in capsys.readouterr().err


def test_text_file_has_one_prompt_a_line(fake_llm, run_main, tmp_path, capsys):
    path = tmp_path / "in.txt"
    path.write_text("one\n\n two\n")
    assert run_main(generate, "--raw", f"--prompts_file={path}") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["ONE", " TWO"]
    assert run_main(generate, f"--prompts_file={path}") == 0
    assert fake_llm.calls[-1][0] == "<user> two<assistant>"


def test_jsonl_file_mixes_all_kinds_and_keeps_their_order(fake_llm, run_main, tmp_path):
    rows = [
        {"id": "a", "prompt": "raw"},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        {"prompt_token_ids": [104, 105], "logprobs": 1},
    ]
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run_main(generate, f"--prompts_file={path}", f"--out={out}") == 0
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["id"] for r in results] == ["a", "b", 2]
    assert [r["text"] for r in results] == ["RAW", "<U", "HI"]
    assert results[1]["num_prompt_tokens"] == len("<user>hi<assistant>")
    assert results[2]["logprobs"][0]["72"]["logprob"] == -0.5
    assert fake_llm.calls[1][0] == "<user>hi<assistant>"
    assert list(tmp_path.glob("*.partial")) == []


def run_rows(run_main, tmp_path, rows, *, out="out.jsonl"):
    """Runs rows as a .jsonl file; returns the exit code and the path of the results."""
    path, out = tmp_path / "in.jsonl", tmp_path / out
    path.write_text("\n".join(map(json.dumps, rows)))
    return run_main(generate, f"--prompts_file={path}", f"--out={out}"), out


BAD_ROWS = [
    ({"prompt": 5}, "'prompt' must be a str, got int"),
    ({"prompt": None}, "needs a value, got None"),
    ({"prompt": ["a"]}, "'prompt' must be a str, got list"),
    ({"prompt_token_ids": None}, "needs a value, got None"),
    ({"prompt_token_ids": 5}, "'prompt_token_ids' must be a list of token ids, got 5"),
    ({"prompt_token_ids": {"5": 6}}, "must be a list of token ids, got {'5': 6}"),
    ({"prompt_token_ids": []}, "at least 1 token"),
    ({"messages": "no list"}, "messages must be a list, got 'no list'"),
    ({"messages": 5}, "messages must be a list, got 5"),
    ({"messages": []}, "messages must be a non-empty list"),
    ({"messages": [5]}, "message 0 must be a mapping"),
]


@pytest.mark.parametrize("bad, message", BAD_ROWS)
def test_bad_row_is_an_error_that_names_its_line_and_the_others_run(
    fake_llm, run_main, tmp_path, capsys, bad, message
):
    """A wrong type used to fail the whole file once the engine was built."""
    rows = [{"prompt": "a"}, {"id": "x"} | bad, {"prompt": "b"}]
    code, out = run_rows(run_main, tmp_path, rows)
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["text"] for r in results] == ["A", "", "B"]
    assert [r["finish_reason"] for r in results] == ["length", "error", "length"]
    assert results[1]["error"].startswith("line 2: ") and message in results[1]["error"]
    assert code == 1
    assert "1 of 3 failed: ['x']" in capsys.readouterr().err


def test_file_of_one_bad_row_has_its_error_as_result(fake_llm, run_main, tmp_path):
    code, out = run_rows(run_main, tmp_path, [{"prompt_token_ids": []}])
    (line,) = out.read_text().splitlines()
    assert code == 1 and "line 1: the prompt must have" in json.loads(line)["error"]


@pytest.mark.parametrize("out", ["nowhere/out.jsonl", "a_folder"])
def test_results_that_cannot_be_written_are_told_before_the_engine_is_built(
    run_main, tmp_path, capsys, monkeypatch, out
):
    """The file used to be opened once everything had run: all of it was lost."""
    monkeypatch.delattr(generate.engine_flags, "build_llm")
    (tmp_path / "a_folder").mkdir()
    code, out = run_rows(run_main, tmp_path, [{"prompt": "a"}], out=out)
    assert code == 1
    err = capsys.readouterr().err
    assert str(out) in err and err.count("\n") == 1


def test_rows_that_finished_are_kept_when_the_run_breaks_off(
    fake_llm, run_main, tmp_path, capsys, monkeypatch
):
    def stream(prompt, params, start=fake_llm.stream):
        return breaks_off() if prompt["prompt"] == "b" else start(prompt, params)

    def breaks_off():
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(fake_llm, "stream", stream)
    with pytest.raises(KeyboardInterrupt):
        run_rows(run_main, tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    (partial,) = tmp_path.glob("out*")
    assert partial.name == "out.jsonl.partial"
    assert json.loads(partial.read_text())["text"] == "A"
    assert f"the rows that finished are in {partial}" in capsys.readouterr().err


def test_run_that_breaks_off_before_any_row_leaves_no_file(
    run_main, tmp_path, capsys, monkeypatch
):
    def build_llm():
        raise ValueError("no such model")

    monkeypatch.setattr(generate.engine_flags, "build_llm", build_llm)
    code, _ = run_rows(run_main, tmp_path, [{"prompt": "a"}])
    assert (code, capsys.readouterr().err) == (1, "error: no such model\n")
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: "),
        ("[1, 2]", "line 2: wants a JSON object, got list"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "line 2: wants one of"),
        ('{"id": 1}', "line 2: wants one of"),
        ('{"prompt": "a", "max_token": 3}', "line 2: unknown keys ['max_token']"),
        ('{"prompt": "a", "top_p": 7}', "line 2: top_p must be in"),
    ],
)
def test_wrong_line_is_named_before_the_engine_is_built(
    run_main, tmp_path, capsys, monkeypatch, line, message
):
    monkeypatch.delattr(generate.engine_flags, "build_llm")
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    assert run_main(generate, f"--prompts_file={path}") == 1
    assert message in capsys.readouterr().err


def test_empty_file_is_refused(fake_llm, run_main, tmp_path, capsys):
    path = tmp_path / "in.txt"
    path.write_text("\n\n")
    assert run_main(generate, f"--prompts_file={path}") == 1
    assert "holds no prompt" in capsys.readouterr().err
