"""batch_generate: what it refuses and why, what it tells, its exit codes."""

import dataclasses
import errno
import os
import signal
import types

import pytest
from batch_jobs import FakeRows, write_rows

from headrace.configs.schema import EngineConfig
from headrace.scripts import (
    batch_fingerprint,
    batch_generate,
    batch_journal,
    engine_flags,
)
from headrace.scripts.batch_engine import pinned

NUM_ROWS = 32
CONFIG = EngineConfig(num_pages=9, num_slots=4)


@pytest.fixture
def job(monkeypatch, tmp_path, run_main):
    """A job whose engine is fake: `run(*flags)`, `facts` of the engine, `engines`."""
    state = types.SimpleNamespace(
        facts={"weights": "w1", "device": {"kind": "cpu"}, "programs": {"decode": "h"}},
        config=CONFIG, engines=[], folder=tmp_path, make=FakeRows,
    )  # fmt: skip

    def build_llm(change):
        llm = types.SimpleNamespace(engine_config=change(state.config), tokenizer=None)
        state.built = llm
        return llm

    def engine_facts(llm):
        settings = batch_fingerprint.engine_settings(llm.engine_config)
        return state.facts | {"engine": settings}

    def rows(llm, chat_date):
        state.engines.append(state.make())
        return state.engines[-1]

    monkeypatch.setattr(engine_flags, "build_llm", build_llm)
    monkeypatch.setattr(batch_fingerprint, "engine_facts", engine_facts)
    monkeypatch.setattr(batch_generate, "LLMRows", rows)
    state.input = write_rows(tmp_path / "in.jsonl", NUM_ROWS - 2)
    state.output = tmp_path / "out.jsonl"
    state.journal = tmp_path / "out.jsonl.journal"
    common = ["--max_line_bytes=2000", "--noprogress", f"--output={state.output}"]
    state.run = lambda *flags: run_main(
        batch_generate, *common, f"--input={state.input}", *flags
    )
    return state


def interrupt(job):
    """Has the next run of the job stop half-way, by a signal."""

    class Interrupting(FakeRows):
        def turn(self):
            if len(self.lines) > 12:
                signal.raise_signal(signal.SIGINT)
            return super().turn()

    job.make = Interrupting
    assert job.run() == batch_generate.INTERRUPTED
    job.make = FakeRows


def test_job_is_done_with_error_rows_then_done_already(job, capsys):
    assert job.run() == batch_generate.DONE_WITH_ERRORS
    err = capsys.readouterr().err
    assert "32 rows: 0 in the journal, 32 to compute" in err
    assert "computed 32 rows" in err and "6 error rows" in err
    assert len(job.output.read_text().splitlines()) == NUM_ROWS
    assert sorted(os.listdir(job.folder)) == [
        "in.jsonl", "out.jsonl", "out.jsonl.journal",
    ]  # fmt: skip
    assert job.run() == batch_generate.DONE_WITH_ERRORS
    assert "done already: 32 rows, 6 errors" in capsys.readouterr().err
    assert job.engines[1].lines == []


def test_job_without_error_rows_ends_with_zero(job):
    job.input.write_text('{"prompt_token_ids": [5]}\n')
    assert job.run() == batch_generate.DONE
    assert job.run() == batch_generate.DONE


def test_interrupted_job_keeps_its_rows_and_goes_on(job, capsys):
    interrupt(job)
    kept = job.journal.read_bytes().count(b"\n") - 1
    assert 0 < kept < NUM_ROWS and not job.output.exists()
    assert f"{kept} of 32 are in the journal" in capsys.readouterr().err
    # The handlers of before are back.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert job.run() == batch_generate.DONE_WITH_ERRORS
    missing = NUM_ROWS - kept
    err = capsys.readouterr().err
    assert f"{kept} in the journal, {missing} to compute" in err
    assert f"computed {missing} rows" in err


def change_input(job, monkeypatch):
    with job.input.open("a") as file:
        file.write("{}\n")


def change_threads(job, monkeypatch):
    monkeypatch.setattr(batch_fingerprint, "num_threads", lambda: 99)


def change_version(job, monkeypatch):
    found = batch_fingerprint.importlib.metadata.version
    monkeypatch.setattr(
        batch_fingerprint.importlib.metadata,
        "version",
        lambda name: "9.9" if name == "jaxlib" else found(name),
    )


def change_headrace(job, monkeypatch):
    monkeypatch.setattr(batch_fingerprint.headrace, "__version__", "9.9")


def change_facts(**changes):
    def change(job, monkeypatch):
        job.facts = job.facts | changes

    return change


def change_config(job, monkeypatch):
    job.config = dataclasses.replace(job.config, numerics="fast")


@pytest.mark.parametrize(
    "change, flags, named",
    [
        (change_input, [], "input_sha256: "),
        (change_threads, [], "threads: "),
        (change_version, [], "versions.jaxlib: "),
        (change_headrace, [], "versions.headrace: "),
        (change_config, [], 'engine.numerics: "invariant" -> "fast"'),
        (change_facts(weights="w2"), [], 'weights: "w1" -> "w2"'),
        (change_facts(device={"kind": "gpu"}), [], 'device.kind: "cpu" -> "gpu"'),
        (change_facts(programs={"decode": "g"}), [], 'programs.decode: "h" -> "g"'),
        (None, ['--row_defaults={"max_tokens": 3}'], "parameters.row_defaults.max_tok"),
        (None, ["--row_token_ids"], "parameters.row_token_ids: false -> true"),
        (None, ["--chat_date=2026-01-02"], "parameters.chat_date: "),
        (None, ["--max_line_bytes=3000"], "parameters.max_line_bytes: 2000 -> 3000"),
        (None, ["--model=other"], "parameters.model_name: "),
        (None, ["--shards=0/2"], "shard: [0, 1] -> [0, 2]"),
    ],
)
def test_changed_job_is_refused_by_name_until_it_begins_anew(
    job, monkeypatch, capsys, change, flags, named
):
    interrupt(job)
    before = job.journal.read_bytes()
    if change is not None:
        change(job, monkeypatch)
    capsys.readouterr()
    assert job.run(*flags) == batch_generate.FAILED
    err = capsys.readouterr().err
    assert "is of another job. Changed: " in err and named in err
    assert err.count(" -> ") == 1 and "--restart" in err
    assert job.journal.read_bytes() == before
    assert job.run(*flags, "--restart") in (0, batch_generate.DONE_WITH_ERRORS)
    assert " 0 in the journal" in capsys.readouterr().err


def test_window_policy_and_place_of_the_input_are_no_part_of_the_job(job):
    interrupt(job)
    moved = job.folder / "moved.jsonl"
    job.input = job.input.rename(moved)
    job.config = dataclasses.replace(job.config, policy="priority")
    assert job.run("--window=2") == batch_generate.DONE_WITH_ERRORS


def test_sizes_that_the_config_leaves_open_stay_those_of_the_first_start(job):
    interrupt(job)
    # As if less memory were free now: the config says nothing, the journal does.
    job.config = dataclasses.replace(job.config, num_pages=None)
    assert job.run() == batch_generate.DONE_WITH_ERRORS
    assert job.built.engine_config.num_pages == 9
    assert pinned(CONFIG, {"num_pages": 4}) == CONFIG
    assert pinned(EngineConfig(), None) == EngineConfig()


def test_output_that_no_journal_knows_is_not_replaced(job, capsys):
    job.output.write_text("mine")
    assert job.run() == batch_generate.FAILED
    assert "no journal beside it" in capsys.readouterr().err
    assert job.output.read_text() == "mine" and not job.journal.exists()
    assert job.run("--restart") == batch_generate.DONE_WITH_ERRORS
    assert job.output.read_text() != "mine"


@pytest.mark.parametrize("change", [os.unlink, lambda path: path.write_text("x")])
def test_finished_output_that_is_gone_is_told(job, capsys, change):
    job.run()
    change(job.output)
    assert job.run() == batch_generate.FAILED
    assert "is gone or not what it wrote" in capsys.readouterr().err
    assert job.run("--restart") == batch_generate.DONE_WITH_ERRORS


def test_job_killed_after_its_file_has_landed_is_done(job, monkeypatch):
    def killed(journal, receipt):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_journal.Journal, "finish", killed)
        assert job.run() == batch_generate.INTERRUPTED
    landed = job.output.read_bytes()
    assert job.run() == batch_generate.DONE_WITH_ERRORS
    assert job.output.read_bytes() == landed and job.engines[1].lines == []


def test_second_process_is_refused(job, capsys):
    first = batch_journal.Journal(str(job.journal))
    assert job.run() == batch_generate.FAILED
    assert "another process is at this job" in capsys.readouterr().err
    first.close()
    assert job.run() == batch_generate.DONE_WITH_ERRORS


@pytest.mark.parametrize("part", [".journal", ".partial"])
def test_read_only_folder_is_told_before_an_engine_is_built(
    job, monkeypatch, capsys, part
):
    # As root no mode of a folder would do.
    def refuse(call):
        def opened(path, *args, **kwargs):
            if str(path).endswith(part):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return call(path, *args, **kwargs)

        return opened

    monkeypatch.setattr(batch_journal.os, "open", refuse(os.open))
    monkeypatch.setattr(batch_journal, "open", refuse(open), raising=False)
    assert job.run() == batch_generate.FAILED
    err = capsys.readouterr().err
    assert "Read-only file system" in err and err.count("\n") == 1
    assert not hasattr(job, "built") and not job.output.exists()


def test_folder_that_is_not_there_is_told(job, capsys):
    assert job.run(f"--output={job.folder}/nowhere/out.jsonl") == batch_generate.FAILED
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input="], "--input must name a file"),
        (["--input=/dev/zero"], "must be a regular file"),
        (["--input=/nowhere"], "/nowhere"),
        (["--output=/tmp"], "is a folder"),
        (["--shards=2/2"], "--shards must be I/N"),
        (["--shards=x"], "--shards must be I/N"),
        (['--row_defaults={"temperature": -1}'], "--row_defaults: temperature"),
        (['--row_defaults={"x": 1}'], "--row_defaults: "),
        (["--row_defaults=[]"], "--row_defaults: a JSON object is wanted"),
        (["--chat_date=today"], "today"),
    ],
)
def test_flags_that_make_no_sense_are_refused(job, capsys, flags, message):
    assert job.run(*flags) == batch_generate.FAILED
    assert message in capsys.readouterr().err
    assert not job.journal.exists()


@pytest.mark.parametrize("end", ["", ".journal", ".partial"])
def test_input_is_never_written_to(job, capsys, end):
    flag = f"--output={job.input}"
    if end:
        job.input = job.input.rename(f"{job.output}{end}")
        flag = f"--output={job.output}"
    assert job.run(flag) == batch_generate.FAILED
    assert "must be two files" in capsys.readouterr().err


def test_fast_numerics_promises_rows_alone(job, capsys):
    job.config = dataclasses.replace(job.config, numerics="fast")
    job.run()
    assert "the same rows, not the same bytes" in capsys.readouterr().err
