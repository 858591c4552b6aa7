"""Killed with -9 at random moments, offline jobs go on to the same bytes.

The engine is the two-layer one. Killed jobs are processes of their own; those that go
on run here, on an engine that is built once, but for one, which is a process, too.
scripts/kill_batch.py kills more often, and measures.
"""

import dataclasses
import json
import random
import shutil
import subprocess
import sys
import time

import pytest

from headrace.scripts import batch_generate, engine_flags
from headrace.scripts.kill_batch import (
    Place,
    Tally,
    counts,
    differences,
    journaled,
    kill_at,
    kill_once,
    write_rows,
)

NUM_KILLS = 10
FLAGS = ["--config=tiny", "--window=24"]
SCRIPT = [sys.executable, "-m", "headrace.scripts.batch_generate"]


@dataclasses.dataclass
class Workplace(Place):
    """Jobs run here, too, on one engine."""

    run_main: object = None

    def run_here(self, name):
        return self.run_main(batch_generate, "--noprogress", *self.flags(name))


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
        folder = tmp_path_factory.mktemp("kill")
        place = Workplace(folder, FLAGS, run_main=run_main)
        write_rows(folder / "in.jsonl", num_rows=150)
        # The whole journal, before it shrinks to a receipt.
        finish = batch_generate.Job.merge

        def merge(job):
            size = place.journal("truth.jsonl").stat().st_size
            place.journal_bytes = place.journal_bytes or size
            finish(job)

        patch.setattr(batch_generate.Job, "merge", merge)
        assert place.run_here("truth.jsonl") == batch_generate.DONE_WITH_ERRORS
        place.truth = (place.folder / "truth.jsonl").read_bytes()
        yield place
        for llm in built:
            llm.close()


def test_killed_jobs_go_on_to_the_same_bytes(workplace, capfd):
    rng, within = random.Random(20), []
    for trial in range(NUM_KILLS):
        name = f"{trial}.jsonl"
        was_killed, rows = kill_once(workplace, name, rng)
        output = workplace.output(name)
        within.append(0 < len(rows) < workplace.num_rows)
        assert was_killed or output.exists()
        if output.exists():  # it was killed after its file had landed
            assert output.read_bytes() == workplace.truth
            continue
        capfd.readouterr()
        assert workplace.run_here(name) == batch_generate.DONE_WITH_ERRORS
        missing = workplace.num_rows - len(rows)
        assert counts(capfd.readouterr().err) == (len(rows), missing, missing)
        assert output.read_bytes() == workplace.truth
    # Most fell between the first and the last row.
    assert sum(within) > 0.5 * NUM_KILLS


def test_job_stopped_killed_and_moved_ends_with_the_same_bytes(workplace):
    path, output = workplace.journal("often.jsonl"), workplace.output("often.jsonl")
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
        [*SCRIPT, *FLAGS, "--window=3", f"--input={moved}", f"--output={output}"],
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
        flags = [*workplace.flags(name), f"--shards={index}/2"]
        assert workplace.run_main(batch_generate, *flags) == 3
        parts.append(iter((workplace.folder / name).read_bytes().splitlines()))
    texts = (workplace.folder / "in.jsonl").read_text().split("\n")
    numbers = [n for n, text in enumerate(texts, 1) if text]
    union = [next(parts[number % 2]) for number in numbers]
    assert union == workplace.truth.splitlines()


def test_rows_that_are_lost_doubled_or_changed_are_counted(workplace):
    lines = workplace.truth.splitlines(keepends=True)
    same = {"lost": 0, "doubled": 0, "changed": 0, "files": 0}
    assert differences(workplace.truth, workplace.truth) == same
    other = lines[3].replace(b'"usage"', b'"use"', 1)
    for planted, fault in (
        (lines[:5] + lines[6:], {"lost": 1}),
        (lines + lines[7:9], {"doubled": 2}),
        (lines[:3] + [other] + lines[4:], {"changed": 1}),
        (lines[1::-1] + lines[2:], {}),  # another order
    ):
        found = differences(workplace.truth, b"".join(planted))
        assert found == same | {"files": 1} | fault
        tally = Tally(len(lines))
        tally.wrong.update(found)
        assert not tally.is_right


def test_script_kills_as_often_as_asked_and_finds_the_same_rows():
    flags = ["--num_kills=2", "--job_rows=41", "--kill_seed=3"]
    command = [sys.executable, "-m", "headrace.scripts.kill_batch", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and facts["kills"] == 2 and facts["jobs"] >= 1
    assert facts["before_first_row"] + facts["between"] + facts["after_last_row"] == 2
