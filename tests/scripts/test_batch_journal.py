"""The journal of offline jobs: torn, damaged, locked, full; no finished row is lost."""

import errno
import json
import os
import resource
import subprocess
import sys

import pytest
from batch_jobs import FakeRows, run_job, settings_of, write_rows
from hypothesis import given
from hypothesis import strategies as st

from headrace.scripts import batch_journal
from headrace.scripts.batch_journal import (
    JobError,
    Journal,
    journal_line,
    parse_line,
)

NUM_ROWS = 14


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("journal") / "in.jsonl", NUM_ROWS - 2)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """(output, journal before its end) of a job that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    settings = settings_of(source, folder / "out.jsonl")
    kept = folder / "kept"
    with pytest.MonkeyPatch.context() as patch:
        finish = Journal.finish

        def keep(journal, receipt):
            kept.write_bytes((folder / "out.jsonl.journal").read_bytes())
            finish(journal, receipt)

        patch.setattr(Journal, "finish", keep)
        run_job(settings, FakeRows())
    return (folder / "out.jsonl").read_bytes(), kept.read_bytes()


def resumed(source, folder, journal):
    """Goes on from a journal's bytes: (output, rows computed)."""
    settings = settings_of(source, folder / "out.jsonl")
    (folder / "out.jsonl.journal").write_bytes(journal)
    job = run_job(settings, FakeRows(4))
    output = (folder / "out.jsonl").read_bytes()
    (folder / "out.jsonl").unlink()
    return output, job.num_computed


def loaded(path):
    journal = Journal(str(path))
    journal.load()
    return journal


@given(
    st.integers(1, 2**53), st.binary().filter(lambda b: b"\n" not in b), st.booleans()
)
def test_lines_come_back_as_they_were(number, inner, is_error):
    record = b"{" + inner + b"}"
    entry = parse_line(journal_line(number, record, is_error))
    assert entry == (number, is_error, record)


@given(st.binary(max_size=60))
def test_any_bytes_are_no_line(line):
    assert parse_line(line) is None and parse_line(line + b"\n") is None


def test_each_line_is_a_json_array():
    text = journal_line(7, b'{"a":"]"}', True)
    assert json.loads(text)[1:] == [7, 1, {"a": "]"}] and text.endswith(b"\n")


def test_torn_at_any_byte_it_goes_on_with_all_whole_lines(
    source, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(batch_journal.os, "fsync", lambda handle: None)  # some seconds
    output, journal = whole
    lines = journal.splitlines(True)
    ends = [len(b"".join(lines[:i])) for i in range(len(lines) + 1)]
    # Every byte of the last two rows and of the first line, and some between.
    cuts = {*range(ends[-3], ends[-1] + 1), *range(ends[1] + 3)}
    cuts |= set(range(ends[1], ends[-1], 499))
    for cut in sorted(cuts):
        finished = max(0, sum(end <= cut for end in ends) - 2)
        again, num_computed = resumed(source, tmp_path, journal[:cut])
        assert again == output and num_computed == NUM_ROWS - finished


@given(place=st.floats(0, 1, exclude_max=True), value=st.integers(1, 255))
def test_damaged_byte_costs_its_rows_alone(
    source, whole, tmp_path_factory, place, value
):
    output, journal = whole
    header = journal.index(b"\n") + 1
    at = header + int(place * (len(journal) - header))
    damaged = bytearray(journal)
    damaged[at] ^= value
    folder = tmp_path_factory.mktemp("damaged")
    again, num_computed = resumed(source, folder, bytes(damaged))
    # Where the byte was a line end, two rows are gone.
    assert again == output and 1 <= num_computed <= 2


def test_damaged_lines_are_told(source, whole, tmp_path):
    lines = whole[1].splitlines(True)
    lines[4] = lines[4].replace(b"{", b"[", 1)
    path = tmp_path / "out.jsonl.journal"
    path.write_bytes(b"".join(lines) + b"\0" * 4096)
    journal = loaded(path)
    assert journal.damaged == [5] and journal.num_rows == NUM_ROWS - 1
    journal.close()
    # A dead machine may leave zeros at the end; they are cut off.
    assert path.read_bytes() == b"".join(lines)


def test_damaged_first_line_is_refused(source, whole, tmp_path):
    path = tmp_path / "out.jsonl.journal"
    path.write_bytes(b"x" + whole[1])
    journal = Journal(str(path))
    with pytest.raises(JobError, match="nothing tells whose rows these are"):
        journal.load()
    journal.close()
    assert path.read_bytes() == b"x" + whole[1]


def test_finished_journal_is_a_receipt(source, tmp_path):
    settings = settings_of(source, tmp_path / "out.jsonl")
    run_job(settings, FakeRows())
    journal = loaded(f"{settings.output}.journal")
    assert journal.receipt["num_rows"] == NUM_ROWS
    assert journal.header["facts"] == {} and journal.num_rows == 0
    journal.close()
    assert len(open(f"{settings.output}.journal", "rb").readlines()) == 2


def test_second_process_is_refused_until_the_first_has_ended(tmp_path):
    path = str(tmp_path / "out.journal")
    code = f"""
from headrace.scripts.batch_journal import Journal, JobError
try:
    Journal({path!r})
except JobError as error:
    print(error)
else:
    print("taken")
"""

    def other():
        return subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout

    first = Journal(path)
    first.begin({"facts": {}})
    assert "another process is at this job" in other()
    first.close()
    assert other() == "taken\n"


def test_journal_that_was_replaced_meanwhile_is_opened_anew(tmp_path, monkeypatch):
    path = tmp_path / "out.journal"
    first = Journal(str(path))
    first.begin({"facts": {}})
    lock = batch_journal.fcntl.flock

    def replaced(handle, how):
        # Between our open and our lock the first job ends.
        monkeypatch.setattr(batch_journal.fcntl, "flock", lock)
        first.finish({"num_rows": 0})
        first.close()
        lock(handle, how)

    monkeypatch.setattr(batch_journal.fcntl, "flock", replaced)
    second = loaded(path)
    assert second.receipt == {"num_rows": 0}
    second.close()


def test_rows_are_synced_in_chunks(tmp_path, monkeypatch):
    journal = Journal(str(tmp_path / "out.journal"))
    journal.begin({"facts": {}})
    monkeypatch.setattr(batch_journal, "SYNC_S", 1e9)
    synced = []
    monkeypatch.setattr(batch_journal.os, "fsync", lambda fd: synced.append(fd))
    for number in range(1, 201):
        journal.append(number, b"{}", False)
    assert len(synced) == 200 // batch_journal.SYNC_ROWS
    monkeypatch.setattr(batch_journal, "SYNC_S", 0.0)
    journal.append(201, b"{}", False)
    assert len(synced) == 200 // batch_journal.SYNC_ROWS + 1
    journal.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_write_that_fails_half_way_leaves_whole_lines(tmp_path, monkeypatch, code):
    path = tmp_path / "out.journal"
    journal = Journal(str(path))
    journal.begin({"facts": {}})
    journal.append(1, b'{"a":1}', False)
    before, write = path.read_bytes(), os.write

    def half(handle, data):
        if len(data) < 12:
            raise OSError(code, os.strerror(code))
        return write(handle, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(batch_journal.os, "write", half)
        with pytest.raises(JobError, match="the 1 rows in it are safe") as caught:
            journal.append(2, b'{"b":2}', False)
    is_full = "no room is left" in str(caught.value)
    assert is_full == (code != errno.EIO)
    assert path.read_bytes() == before
    journal.append(2, b'{"b":2}', True)
    assert [entry.number for entry in journal.records()] == [1, 2]
    journal.close()


def test_job_on_a_full_disk_stops_and_goes_on(source, whole, tmp_path):
    settings = settings_of(source, tmp_path / "out.jsonl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(JobError, match="no room is left for .*rows in it are safe"):
            run_job(settings, FakeRows())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = (tmp_path / "out.jsonl.journal").read_bytes()
    assert kept.endswith(b"\n") and 1000 < len(kept) <= 1500
    again, num_computed = resumed(source, tmp_path, kept)
    assert again == whole[0] and num_computed == NUM_ROWS - kept.count(b"\n") + 1


def test_journal_that_says_nothing_is_removed(tmp_path):
    Journal(str(tmp_path / "out.journal")).close()
    assert os.listdir(tmp_path) == []
