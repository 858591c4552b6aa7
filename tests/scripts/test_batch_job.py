"""Offline jobs on a fake engine: order, windows, stops, shards, bounded memory."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest
from batch_jobs import Crash, FakeRows, run_job, settings_of, write_rows

from headrace.scripts import batch_journal
from headrace.scripts.batch_journal import JobError, Journal
from headrace.scripts.batch_records import RecordStyle

NUM_ROWS = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("job") / "in.jsonl", NUM_ROWS)


@pytest.fixture(scope="module")
def truth(source, tmp_path_factory):
    """The output of a job that nobody interrupted."""
    output = tmp_path_factory.mktemp("truth") / "out.jsonl"
    run_job(settings_of(source, output), FakeRows())
    return output.read_bytes()


def line_of(record):
    """The line of the input that a record answers, where it tells."""
    error = record["error"] or {}
    return record.get("line") or error.get("line")


def test_rows_come_in_the_order_of_the_input_with_ids_and_usage(source, truth):
    records = [json.loads(line) for line in truth.splitlines()]
    # The blank line gives no row, the broken and the long one give error rows.
    assert len(records) == NUM_ROWS + 2
    plain = [r for r in records if "custom_id" not in r]
    lines = [line_of(r) for r in records if line_of(r) is not None]
    assert lines == sorted(lines) and 31 not in lines and {32, 33} <= set(lines)
    texts = source.read_text().splitlines()
    for record in plain:
        if record["error"] is None:
            asked = json.loads(texts[record["line"] - 1])
            usage = record["usage"]
            assert usage["prompt_tokens"] == len(asked["prompt_token_ids"])
            whole = record.get("outputs", [record])
            assert len(whole) == asked["n"]
            counts = [len(one["token_ids"]) for one in whole]
            assert usage["completion_tokens"] == sum(counts)
            assert {one["finish_reason"] for one in whole} == {"length"}
    batch = [r for r in records if r.get("response")]
    assert len({r["id"] for r in batch}) == len(batch) > 10
    assert batch[0]["custom_id"] == "row-0"
    body = batch[0]["response"]["body"]
    assert (body["created"], body["object"]) == (0, "text_completion")
    assert body["choices"][0]["finish_reason"] == "length"


def test_bad_rows_become_error_rows_with_line_and_reason(truth):
    records = [json.loads(line) for line in truth.splitlines()]
    errors = {r["error"]["line"]: r["error"] for r in records if r["error"]}
    # Rows 3, 10, 17, 24, then 31 + 3 and so on, whose lines are shifted by three.
    expected = {4, 11, 18, 25, 32, 33, *(i + 4 for i in range(31, 60) if i % 7 == 3)}
    assert set(errors) == expected
    assert errors[32]["message"].startswith("line 32: no JSON")
    assert "longer than max_line_bytes" in errors[33]["message"]
    assert errors[11]["message"] == "line 11: a token is out of range"
    assert "ended with 'error'" in errors[4]["message"]
    assert errors[4]["code"] == "failed" and errors[32]["code"] == "invalid_json"


@pytest.mark.parametrize("order_seed, max_open", [(1, 1), (2, 5), (3, 64)])
def test_bytes_do_not_depend_on_the_order_in_which_rows_end(
    source, truth, tmp_path, order_seed, max_open
):
    settings = settings_of(source, tmp_path / "out.jsonl", window=7 * max_open)
    run_job(settings, FakeRows(order_seed, max_open))
    assert (tmp_path / "out.jsonl").read_bytes() == truth


def test_longest_rows_of_a_window_go_first(tmp_path):
    limits = [3, 50, 7, 200, 1, 9]
    rows = [{"prompt_token_ids": [1], "max_tokens": limit} for limit in limits]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    engine = FakeRows(max_open=1)
    run_job(settings_of(source, tmp_path / "out.jsonl", window=4), engine)
    assert engine.lines == [4, 2, 3, 1, 6, 5]


def test_no_window_waits_for_the_end_of_the_one_before(source, tmp_path):
    class Busy(FakeRows):
        least = 99

        def turn(self):
            if len(self.lines) < NUM_ROWS:
                self.least = min(self.least, self.num_open)
            return super().turn()

    engine = Busy(max_open=4)
    run_job(settings_of(source, tmp_path / "out.jsonl", window=4), engine)
    assert engine.least == 4


def test_stopped_jobs_go_on_with_what_is_missing(source, truth, tmp_path):
    settings = settings_of(source, tmp_path / "out.jsonl")
    rng, computed, num_runs = random.Random(5), 0, 0
    while not os.path.exists(settings.output):
        turns = iter(range(rng.randrange(2, 9)))
        job = run_job(
            settings, FakeRows(num_runs), lambda t=turns: next(t, None) is None
        )
        computed, num_runs = computed + job.num_computed, num_runs + 1
    assert (tmp_path / "out.jsonl").read_bytes() == truth
    assert num_runs > 3 and computed == NUM_ROWS + 2


def test_crashed_jobs_go_on_with_what_is_missing(source, truth, tmp_path):
    settings = settings_of(source, tmp_path / "out.jsonl")
    lines = []
    for crashes_after in (0, 3, 11, None):
        engine = FakeRows(crashes_after or 0, crashes_after=crashes_after)
        try:
            run_job(settings, engine)
        except Crash:
            assert crashes_after is not None
        lines += engine.lines
    assert (tmp_path / "out.jsonl").read_bytes() == truth
    # A row is submitted twice only if it was open when the job crashed.
    assert len(lines) <= NUM_ROWS + 3 * 5


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_together_are_the_whole(source, truth, tmp_path, count):
    rows = []
    for index in range(count):
        output = tmp_path / f"{index}.jsonl"
        run_job(settings_of(source, output, shard=(index, count)), FakeRows(index))
        rows.append(output.read_bytes().splitlines())
    numbers = [n for n in range(1, NUM_ROWS + 4) if n != 31]
    shards = [iter(part) for part in rows]
    union = [next(shards[number % count]) for number in numbers]
    assert union == truth.splitlines()
    assert sum(map(len, rows)) == len(union)


def test_seeds_and_ids_follow_from_the_fingerprint(source, truth, tmp_path):
    other = RecordStyle(job="b" * 64, model="fake", has_token_ids=True)
    run_job(settings_of(source, tmp_path / "out.jsonl"), FakeRows(), style=other)
    mine, theirs = (
        [json.loads(line) for line in text.splitlines()]
        for text in (truth, (tmp_path / "out.jsonl").read_bytes())
    )
    for one, two in zip(mine, theirs, strict=True):
        if one.get("response"):
            assert one["id"] != two["id"]
        elif one["error"] is None and "seed" in one:
            assert one["seed"] != two["seed"] and one["text"] != two["text"]


def test_input_that_changes_under_way_is_noticed(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", 50)

    class Meddling(FakeRows):
        def submit(self, row):
            super().submit(row)
            if len(self.lines) == 10:
                with source.open("a") as file:
                    file.write("{}\n")

    with pytest.raises(JobError, match="has changed while the job ran"):
        run_job(settings_of(source, tmp_path / "out.jsonl"), Meddling())
    assert not (tmp_path / "out.jsonl").exists()


def test_failed_engine_makes_no_error_rows(source, tmp_path):
    class Failing(FakeRows):
        def turn(self):
            if len(self.lines) > 20:
                raise JobError("the engine has failed")
            return super().turn()

    settings = settings_of(source, tmp_path / "out.jsonl")
    with pytest.raises(JobError, match="the engine has failed"):
        run_job(settings, Failing())
    journal = Journal(f"{settings.output}.journal")
    journal.load()
    records = [json.loads(entry.record) for entry in journal.records()]
    journal.close()
    assert 5 < len(records) < 21
    messages = [r["error"]["message"] for r in records if r["error"]]
    assert not any("engine has failed" in message for message in messages)


def test_output_without_room_leaves_the_journal_whole(
    source, truth, tmp_path, monkeypatch
):
    settings = settings_of(source, tmp_path / "out.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(batch_journal.os, "fsync", _full_for_partial)
        with pytest.raises(JobError, match="No space left.*62 rows are safe"):
            run_job(settings, FakeRows())
    assert os.listdir(tmp_path) == ["out.jsonl.journal"]
    engine = FakeRows()
    run_job(settings, engine)
    assert (tmp_path / "out.jsonl").read_bytes() == truth and engine.lines == []


def _full_for_partial(handle):
    if os.readlink(f"/proc/self/fd/{handle}").endswith(".partial"):
        raise OSError(28, "No space left on device")


def test_memory_stays_flat_over_many_rows():
    code = f"""
import json, resource, sys, tempfile, pathlib
sys.path.insert(0, {str(pathlib.Path(__file__).parents[1] / "shared")!r})
from batch_jobs import FakeRows, run_job, settings_of
from headrace.scripts import batch_journal
assert "jax" not in sys.modules
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
batch_journal.SYNC_ROWS = 10**6  # the disk's time is not what this is about
row = '{{"prompt_token_ids": [%d], "max_tokens": 2}}\\n'
bad = '{{"id": %d}}\\n'  # an error row costs less time, and as much memory
def job(count):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "in.jsonl")
        with source.open("w") as file:
            for i in range(count):
                file.write((bad if i % 10 else row) % (i % 500))
        settings = settings_of(source, f"{{folder}}/out.jsonl", window=1024)
        assert run_job(settings, FakeRows(max_open=64)).num_computed == count
    return peak()
print(json.dumps([job(4000), job(200_000)]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    small_mb, large_mb = json.loads(done.stdout)
    # 200,000 rows are 60 MB of journal and output; the index is 1.6 MB.
    assert large_mb - small_mb < 12
