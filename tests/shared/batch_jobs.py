"""An offline job without a model: rows, a fake engine, and a job run to a stop."""

import dataclasses
import json
import random
import zlib

from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.scripts.batch_engine import Finished
from headrace.scripts.batch_job import Job, JobSettings, scan_input
from headrace.scripts.batch_journal import Journal
from headrace.scripts.batch_records import RecordStyle

STYLE = RecordStyle(job="a" * 64, model="fake", has_token_ids=True)


class FakeRows:
    """A RowEngine whose tokens follow from prompt and seed; rows end in any order.

    Prompts that hold token 666 are refused, and those with 667 end with an error.
    """

    def __init__(self, order_seed=0, max_open=5, crashes_after=None):
        self.max_open, self.num_tokens = max_open, 0
        self.lines = []  # of the rows that were submitted, in their order
        self._crashes_after = crashes_after
        self._open, self._rng = [], random.Random(order_seed)

    @property
    def num_open(self):
        return len(self._open)

    def submit(self, row):
        assert self.num_open < self.max_open
        self.lines.append(row.line)
        if 666 in row.prompt["prompt_token_ids"]:
            raise ValueError("a token is out of range")
        self._open.append(row)

    def turn(self):
        self._rng.shuffle(self._open)
        count = self._rng.randrange(len(self._open) + 1)
        done, self._open = self._open[:count], self._open[count:]
        self.num_tokens += count
        if self._crashes_after is not None and self.num_tokens > self._crashes_after:
            raise Crash
        return [Finished(row, reply(row)) for row in done]


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


def reply(row):
    """What the fake engine answers."""
    ids = row.prompt["prompt_token_ids"]
    reason = "error" if 667 in ids else "length"
    outputs = []
    for index in range(row.params.n):
        key = f"{ids}:{row.params.seed}:{index}".encode()
        count = min(row.params.max_tokens or 9, 9)
        tokens = [zlib.crc32(key + bytes([i])) % 500 for i in range(count)]
        outputs.append(
            CompletionOutput(
                index=index, text=f"<{tokens}>", token_ids=tokens,
                finish_reason=reason, seed=row.params.seed,
            )
        )  # fmt: skip
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=ids, outputs=outputs,
        finished=True,
    )  # fmt: skip


def row_of(index, **fields):
    """A row of mixed form; every seventh is wrong in some way."""
    rng = random.Random(index)
    ids = [rng.randrange(500) for _ in range(rng.randrange(1, 30))]
    if index % 7 == 3:
        ids[0] = 666 + index % 2
    limit = rng.randrange(1, 40)
    if index % 3 == 0:
        body = {"prompt": ids, "max_tokens": limit, "model": "m"} | fields
        return {
            "custom_id": f"row-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": body,
        }
    return {"prompt_token_ids": ids, "max_tokens": limit, "n": 1 + index % 2} | fields


def write_rows(path, count):
    """A file of rows with a blank line, a broken one and a long one among them."""
    lines = [json.dumps(row_of(i)) for i in range(count)]
    lines[count // 2 : count // 2] = ["", "{broken", '{"prompt": "' + "x" * 3000 + '"}']
    path.write_text("\n".join(lines) + "\n")
    return path


def settings_of(source, output, **changes):
    """Settings with a small window, and lines of 2000 bytes at most."""
    settings = JobSettings(
        input=str(source),
        output=str(output),
        defaults={},
        window=16,
        max_line_bytes=2000,
    )
    return dataclasses.replace(settings, **changes)


def run_job(settings, engine, should_stop=lambda: False, style=STYLE):
    """Begins a job or goes on with it; merges where it is whole. Returns the Job."""
    journal = Journal(f"{settings.output}.journal")
    try:
        journal.load()
        if journal.header is None:
            journal.begin({"facts": {}})
        job = Job(settings, scan_input(settings), journal, style)
        if job.run(engine, should_stop=should_stop):
            job.merge()
        return job
    finally:
        journal.close()
