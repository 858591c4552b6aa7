"""Killed with -9 at random moments, offline jobs go on to the same bytes.

The engine is the two-layer one. Killed jobs are processes of their own; those that go
on run here, on an engine that is built once, but for one, which is a process, too.
HEADRACE_BATCH_KILLS=50 kills more often than the 10 times of every run, and tells when.
"""

import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from headrace.scripts import batch_generate, engine_flags
from headrace.scripts.batch_journal import parse_line

NUM_KILLS = int(os.environ.get("HEADRACE_BATCH_KILLS", "10"))
NUM_ROWS = 150
FLAGS = ["--config=tiny", "--window=24", "--noprogress"]
SCRIPT = [sys.executable, "-m", "headrace.scripts.batch_generate", *FLAGS]


def write_rows(path):
    """Rows of both forms; some sample without a seed, some are wrong."""
    rng = random.Random(8)
    with path.open("w") as file:
        for index in range(NUM_ROWS):
            ids = [rng.randrange(1, 512) for _ in range(rng.randrange(1, 90))]
            limit = rng.randrange(1, 40)
            row = {"prompt_token_ids": ids, "max_tokens": limit, "ignore_eos": True}
            if index % 8 == 0:
                row |= {"n": 2, "logprobs": 2}
            if index % 4 == 1:
                body = {"prompt": ids, "max_tokens": limit, "temperature": 0.7}
                url, name = "/v1/completions", f"row-{index}"
                row = {"custom_id": name, "method": "POST", "url": url, "body": body}
            if index % 25 == 7:
                row["max_tokens"] = 4000
            file.write(json.dumps(row) + "\n")
            if index % 40 == 20:
                file.write("\n[broken\n")


@dataclasses.dataclass
class Workplace:
    """An input, the output of a job that nobody killed, and its journal's size."""

    folder: pathlib.Path
    run_main: object
    truth: bytes = b""
    num_rows: int = 0
    journal_bytes: int = 0

    def flags(self, name):
        return [f"--input={self.folder / 'in.jsonl'}", f"--output={self.folder / name}"]

    def run_here(self, name):
        return self.run_main(batch_generate, *FLAGS, *self.flags(name))

    def start(self, name):
        return subprocess.Popen(
            [*SCRIPT, *self.flags(name)], stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """The engine is built once; every later job here gets the same."""
    from absl import flags
    from absl.testing import flagsaver

    built, build = [], engine_flags.build_llm

    def build_once(change):
        if not built:
            built.append(build(change))
        return built[0]

    def run_main(script, *arguments):
        with flagsaver.flagsaver():
            return script.main(flags.FLAGS(["script", *arguments]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_flags, "build_llm", build_once)
        place = Workplace(tmp_path_factory.mktemp("kill"), run_main)
        write_rows(place.folder / "in.jsonl")
        # The whole journal, before it shrinks to a receipt.
        finish = batch_generate.Job.merge

        def merge(job):
            path = f"{job.settings.output}.journal"
            place.journal_bytes = place.journal_bytes or os.path.getsize(path)
            finish(job)

        patch.setattr(batch_generate.Job, "merge", merge)
        assert place.run_here("truth.jsonl") == batch_generate.DONE_WITH_ERRORS
        place.truth = (place.folder / "truth.jsonl").read_bytes()
        place.num_rows = len(place.truth.splitlines())
        yield place
        for llm in built:
            llm.close()


def journaled(path):
    """Numbers of the rows in a journal, as a killed process left it."""
    if not path.exists():
        return []
    entries = [parse_line(line) for line in path.read_bytes().splitlines(True)]
    return [entry.number for entry in entries if entry is not None][1:]


def kill_at(process, path, num_bytes, delay_s):
    """Kills a process once its journal has a size and some time has passed."""
    while process.poll() is None:
        size = path.stat().st_size if path.exists() else 0
        if size >= num_bytes:
            time.sleep(delay_s)
            break
        time.sleep(0.0005)
    process.kill()
    process.wait()


def kill_once(place, name, rng):
    """One job, killed at a random moment; gives the rows that it had finished."""
    path = place.folder / f"{name}.journal"
    # Up to the last rows: what is beyond them is a merge of some milliseconds.
    num_bytes = rng.randrange(place.journal_bytes)
    process = place.start(name)
    kill_at(process, path, num_bytes, rng.random() * 0.05)
    rows = journaled(path)
    assert len(rows) == len(set(rows))
    return rows


def counts(text):
    """What a job told: rows in its journal, rows to compute, rows computed."""
    found = re.search(r"(\d+) in the journal, (\d+) to compute", text)
    done = re.search(r"done: computed (\d+) rows", text)
    return int(found[1]), int(found[2]), int(done[1])


def test_killed_jobs_go_on_to_the_same_bytes(workplace, capfd):
    rng, within = random.Random(20), []
    for trial in range(NUM_KILLS):
        name = f"{trial}.jsonl"
        rows = kill_once(workplace, name, rng)
        output = workplace.folder / name
        within.append(0 < len(rows) < workplace.num_rows)
        if output.exists():  # it was killed after its file had landed
            assert output.read_bytes() == workplace.truth
            continue
        capfd.readouterr()
        assert workplace.run_here(name) == batch_generate.DONE_WITH_ERRORS
        missing = workplace.num_rows - len(rows)
        assert counts(capfd.readouterr().err) == (len(rows), missing, missing)
        assert output.read_bytes() == workplace.truth
        if NUM_KILLS > 10:
            with capfd.disabled():
                print(f"kill {trial}: {len(rows)} of {workplace.num_rows} rows")
    # Most fell between the first and the last row.
    assert sum(within) > 0.6 * NUM_KILLS


def test_job_stopped_killed_and_moved_ends_with_the_same_bytes(workplace):
    path = workplace.folder / "often.jsonl.journal"
    output = workplace.folder / "often.jsonl"
    stopped = workplace.start("often.jsonl")
    while stopped.poll() is None and not journaled(path):
        time.sleep(0.001)
    stopped.terminate()
    told = stopped.communicate()[1]
    assert stopped.returncode == batch_generate.INTERRUPTED
    first = len(journaled(path))
    assert f"{first} of {workplace.num_rows} are in the journal" in told
    killed = workplace.start("often.jsonl")
    kill_at(killed, path, 0.7 * workplace.journal_bytes, 0.0)
    second = len(journaled(path))
    assert 0 < first < second < workplace.num_rows
    # Where the input lies and how many rows a window has say nothing about the job.
    moved = workplace.folder / "elsewhere.jsonl"
    shutil.copy(workplace.folder / "in.jsonl", moved)
    last = subprocess.run(
        [*SCRIPT, "--window=3", f"--input={moved}", f"--output={output}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert last.returncode == batch_generate.DONE_WITH_ERRORS
    missing = workplace.num_rows - second
    assert counts(last.stderr) == (second, missing, missing)
    assert output.read_bytes() == workplace.truth


def test_shards_of_a_job_are_the_whole(workplace):
    parts = []
    for index in range(2):
        name = f"shard{index}.jsonl"
        flags = [*FLAGS, *workplace.flags(name), f"--shards={index}/2"]
        assert workplace.run_main(batch_generate, *flags) == 3
        parts.append(iter((workplace.folder / name).read_bytes().splitlines()))
    texts = (workplace.folder / "in.jsonl").read_text().split("\n")
    numbers = [n for n, text in enumerate(texts, 1) if text]
    union = [next(parts[number % 2]) for number in numbers]
    assert union == workplace.truth.splitlines()
