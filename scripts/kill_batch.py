"""Kills an offline job with SIGKILL at random moments and lets it go on.

    python -m headrace.scripts.kill_batch --num_kills=50
    python -m headrace.scripts.kill_batch --job_flag=--model=smollm2-135m-instruct

One job runs undisturbed; the same job, in processes of its own, is killed up to three
times, ends, and must have written the same bytes: no row lost or doubled, the same
tokens. That is repeated until --num_kills have fallen. Prints where they fell, and a
JSON line; exits with 1 where anything differs, or a job computed a row that its journal
had.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from headrace.scripts.batch_generate import DONE_WITH_ERRORS, journal_path
from headrace.scripts.batch_journal import parse_line

FLAGS = flags.FLAGS
_MAX_KILLS_A_JOB = 3
_EARLY = 0.1  # of the kills fall while a run starts
_MERGE_S = 0.02  # a kill this much later than a row falls into what follows it

flags.DEFINE_integer("num_kills", 50, "Kills in all.", lower_bound=1)
flags.DEFINE_integer("kill_seed", 0, "Seed of the rows and of the moments.")
flags.DEFINE_integer("job_rows", 150, "Rows of the job.", lower_bound=41)
flags.DEFINE_multi_string(
    "job_flag", ["--config=tiny", "--window=24"], "Flags of batch_generate."
)


@dataclasses.dataclass
class Place:
    """Where one job runs again and again.

    Attributes:
      folder: of its input and outputs.
      job_flags: of batch_generate, but for the paths.
      truth: the output of a run that nobody killed.
      journal_bytes: of that run's journal, with all rows.
      start_s: seconds that run took to its first rows.
    """

    folder: pathlib.Path
    job_flags: Sequence[str]
    truth: bytes = b""
    journal_bytes: int = 0
    start_s: float = 0.0

    @property
    def num_rows(self) -> int:
        """Rows of the output."""
        return len(self.truth.splitlines())

    def output(self, name: str) -> pathlib.Path:
        """Where a run's output lands."""
        return self.folder / name

    def journal(self, name: str) -> pathlib.Path:
        """Where its journal lies."""
        return pathlib.Path(journal_path(str(self.output(name))))

    def flags(self, name: str) -> list[str]:
        """All flags of a run."""
        source, output = self.folder / "in.jsonl", self.output(name)
        return [*self.job_flags, f"--input={source}", f"--output={output}"]

    def start(self, name: str) -> subprocess.Popen[str]:
        """A run in a process of its own."""
        command = [sys.executable, "-m", "headrace.scripts.batch_generate"]
        return subprocess.Popen(
            [*command, "--noprogress", *self.flags(name)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def write_rows(path: pathlib.Path, num_rows: int, seed: int = 8) -> None:
    """Rows of both forms; some sample without a seed, some are wrong."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for index in range(num_rows):
            ids = [rng.randrange(1, 512) for _ in range(rng.randrange(1, 90))]
            limit = rng.randrange(1, 40)
            row: dict[str, Any] = {"prompt_token_ids": ids, "max_tokens": limit}
            row["ignore_eos"] = True
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


def journaled(path: pathlib.Path) -> list[int]:
    """Numbers of the rows in a journal, as a killed process left it."""
    if not path.exists():
        return []
    entries = [parse_line(line) for line in path.read_bytes().splitlines(True)]
    return [entry.number for entry in entries if entry is not None][1:]


def kill_at(
    process: subprocess.Popen[str], path: pathlib.Path, num_bytes: int, delay_s: float
) -> None:
    """Kills a process once its journal has a size and some time has passed."""
    while process.poll() is None:
        if _size(path) >= num_bytes:
            time.sleep(delay_s)
            break
        time.sleep(0.0005)
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def kill_once(place: Place, name: str, rng: random.Random) -> tuple[bool, list[int]]:
    """A run that is killed at a random moment from where the job stands.

    Returns:
      Whether it was killed, not at its end before; the rows that the journal has then.

    Raises:
      AssertionError: a row stands in the journal twice.
    """
    path, delay_s = place.journal(name), rng.random() * _MERGE_S
    # Up to the last rows: what is beyond them is a merge of some milliseconds.
    most = place.journal_bytes
    num_bytes = rng.randrange(min(_size(path), most - 1), most)
    if rng.random() < _EARLY:
        num_bytes, delay_s = 0, rng.random() * place.start_s
    process = place.start(name)
    kill_at(process, path, num_bytes, delay_s)
    rows = journaled(path)
    assert len(rows) == len(set(rows)), f"{path}: a row twice"
    return process.returncode == -signal.SIGKILL, rows


def counts(text: str) -> tuple[int, int, int]:
    """What a job told: rows in its journal, rows to compute, rows computed."""
    found = re.search(r"(\d+) in the journal, (\d+) to compute", text)
    done = re.search(r"done: computed (\d+) rows", text)
    assert found is not None and done is not None, text
    return int(found[1]), int(found[2]), int(done[1])


def differences(truth: bytes, output: bytes) -> dict[str, int]:
    """How many rows an output has lost, has twice, has with other content."""
    wanted = {_id(line): line for line in truth.splitlines()}
    found = collections.defaultdict(list)
    for line in output.splitlines():
        found[_id(line)].append(line)
    return {
        "lost": len(wanted.keys() - found.keys()),
        "doubled": sum(len(lines) - 1 for lines in found.values()),
        "changed": sum(
            any(line != wanted.get(name) for line in lines)
            for name, lines in found.items()
        ),
        "files": int(truth != output),
    }


def _id(line: bytes) -> str:
    row = json.loads(line)
    return f"{row.get('line')} {row['id']}"


def _size(path: pathlib.Path) -> int:
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


class Tally:
    """What has become of the kills so far."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self.kills = num_rows, list[int]()
        self.num_jobs, self.num_anew = 0, 0
        self.wrong: collections.Counter[str] = collections.Counter()

    def facts(self) -> dict[str, Any]:
        """For the JSON line."""
        between = sum(0 < rows < self._num_rows for rows in self.kills)
        return {
            "kills": len(self.kills),
            "before_first_row": self.kills.count(0),
            "between": between,
            "after_last_row": len(self.kills) - between - self.kills.count(0),
            "jobs": self.num_jobs,
            "rows": self._num_rows,
            "rows_computed_anew": self.num_anew,
            **{f"{k}_rows": self.wrong[k] for k in ("lost", "doubled", "changed")},
            "differing_files": self.wrong["files"],
        }

    @property
    def is_right(self) -> bool:
        """Whether every job ended as the undisturbed one."""
        return not self.num_anew and not self.wrong.total()


def undisturbed(place: Place) -> None:
    """Runs the job without a kill: what the others must come to.

    Raises:
      OSError: it fails.
    """
    begin_s = time.monotonic()
    process, path = place.start("truth.jsonl"), place.journal("truth.jsonl")
    while process.poll() is None:  # the journal is a receipt afterwards
        if not journaled(path):
            place.start_s = time.monotonic() - begin_s
        place.journal_bytes = max(place.journal_bytes, _size(path))
        time.sleep(0.0005)
    told = process.communicate()[1]
    if process.returncode != DONE_WITH_ERRORS:
        raise OSError(f"the job ends with {process.returncode}: {told}")
    place.truth = place.output("truth.jsonl").read_bytes()


def kill_a_job(place: Place, rng: random.Random, tally: Tally, most: int) -> None:
    """Kills a job up to `most` times, lets it end, and looks at what it wrote."""
    name = f"{tally.num_jobs}.jsonl"
    before: list[int] = []
    for _ in range(rng.randint(1, most)):
        was_killed, rows = kill_once(place, name, rng)
        has_landed = place.output(name).exists()  # just before the kill
        tally.kills += [place.num_rows if has_landed else len(rows)] * was_killed
        if has_landed:
            break
        tally.wrong["lost"] += len(set(before) - set(rows))
        before = rows
    if not has_landed:
        process = place.start(name)
        told = process.communicate()[1]
        if process.returncode != DONE_WITH_ERRORS:
            raise OSError(f"it does not go on: {process.returncode}, {told}")
        kept, _, computed = counts(told)
        tally.wrong["lost"] += len(before) - kept
        tally.num_anew += computed - (place.num_rows - kept)
    tally.wrong.update(differences(place.truth, place.output(name).read_bytes()))
    tally.num_jobs += 1


def run() -> int:
    """Returns the exit code."""
    rng, begin_s = random.Random(FLAGS.kill_seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(pathlib.Path(folder), FLAGS.job_flag)
        write_rows(place.folder / "in.jsonl", FLAGS.job_rows)
        undisturbed(place)
        tally = Tally(place.num_rows)
        while (left := FLAGS.num_kills - len(tally.kills)) > 0:
            kill_a_job(place, rng, tally, min(left, _MAX_KILLS_A_JOB))
            fell = ", ".join(map(str, tally.kills))
            print(f"rows journaled at each kill, of {place.num_rows}: {fell}")
    facts = tally.facts() | {"seconds": round(time.monotonic() - begin_s, 1)}
    for key, value in facts.items():
        print(f"{key:<20}{value:>8}")
    print(json.dumps(facts))
    return 0 if tally.is_right else 1


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where a job was not what it should be."""
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, got {argv[1:]}")
    try:
        return run()
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    app.run(main)
