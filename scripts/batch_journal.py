"""The journal of an offline job: finished rows, append-only, beside the output.

Each line is a JSON array whose first item is the CRC-32 of all that follows it:

    ["5f3a90c1",0,{header}]                      the first line: whose job this is
    ["c86e0b4d",LINE,IS_ERROR,{record}]          a finished row
    ["77a1e2f3",0,{"done": {...}}]               a receipt: the output has landed

A row is finished once its line is whole. Lines are written one by one, so a killed
process loses none of them, and synced to the disk every SYNC_ROWS rows or SYNC_S
seconds, so a dead machine loses that much. One process at a time holds the lock.
"""

import array
import errno
import fcntl
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SYNC_ROWS, SYNC_S = 64, 1.0
FORMAT = 1

_LINE = re.compile(
    rb'\["([0-9a-f]{8})",((\d{1,18}),(?:([01]),)?(\{.*\}))\]\n', re.DOTALL
)


class JobError(RuntimeError):
    """The job cannot begin or go on; the message says why, and what is safe."""


class Entry(NamedTuple):
    """One line: its row's number (0: header or receipt), and its JSON."""

    number: int
    is_error: bool
    record: bytes


def journal_line(number: int, record: bytes, is_error: bool | None = None) -> bytes:
    """A line of the journal; `record` is one JSON object without a line end."""
    flag = b"" if is_error is None else b"%d," % is_error
    rest = b"%d,%b%b" % (number, flag, record)
    return b'["%08x",%b]\n' % (zlib.crc32(rest), rest)


def parse_line(line: bytes) -> Entry | None:
    """What a whole line holds; None where it is torn or damaged."""
    match = _LINE.fullmatch(line)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        return None
    return Entry(int(match[3]), match[4] == b"1", match[5])


class Journal:
    """One job's journal, locked while it is open.

    Args:
      path: of the journal; made where it is missing.

    Attributes:
      header: what `begin` stored; None in a new journal.
      receipt: what `finish` stored; None until then.
      num_rows, num_errors: finished rows, and how many of them are errors.
      damaged: numbers of the journal's lines that are of no use.

    Raises:
      JobError: another process has it, or its first line is damaged.
      OSError: it cannot be made or written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = _open_locked(path)
        self.header: dict[str, Any] | None = None
        self.receipt: dict[str, Any] | None = None
        self.num_rows = self.num_errors = 0
        self.damaged: list[int] = []
        # Where each row's line begins, 8 bytes a row; 0 is the header's own place.
        self._offsets = array.array("q")
        self._size = self._num_unsynced = 0
        self._synced_s = time.monotonic()

    def load(self) -> None:
        """Reads what is there, and cuts off a torn end.

        Raises:
          JobError: the first line is damaged, so nobody knows whose job this is.
        """
        number = self._size = 0
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._take_in(number, line)
                self._size += len(line)
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def _take_in(self, number: int, line: bytes) -> None:
        entry = parse_line(line)
        fields = _fields(entry) if entry is not None and entry.number == 0 else None
        if number == 1:
            if fields is None or fields.get("format") != FORMAT:
                raise JobError(
                    f"{self._path}: the first line is damaged or of another version, "
                    f"so nothing tells whose rows these are; --restart deletes them"
                )
            self.header = fields
        elif entry is None:
            self.damaged.append(number)
        elif fields is not None:
            self.receipt = fields.get("done")
        elif not self.has(entry.number):
            self._book(entry.number, entry.is_error, self._size)

    def begin(self, header: dict[str, Any]) -> None:
        """Stores whose job this is, in a journal that is empty."""
        assert self._size == 0
        self.header = {"format": FORMAT} | header
        self._write(journal_line(0, _dumped(self.header)))
        self.sync()

    def restart(self) -> None:
        """Forgets everything."""
        os.ftruncate(self._fd, 0)
        os.fsync(self._fd)
        self.header = self.receipt = None
        self.num_rows = self.num_errors = self._size = 0
        self.damaged, self._offsets = [], array.array("q")

    def has(self, number: int) -> bool:
        """Whether a row is finished."""
        return number < len(self._offsets) and self._offsets[number] != 0

    def append(self, number: int, record: bytes, is_error: bool) -> None:
        """Stores a finished row.

        Raises:
          JobError: the disk is full or fails; the rows before it are safe.
        """
        assert not self.has(number), f"row {number} is finished already"
        offset = self._size
        self._write(journal_line(number, record, is_error))
        self._book(number, is_error, offset)
        self._num_unsynced += 1
        self.sync_if_due()

    def _book(self, number: int, is_error: bool, offset: int) -> None:
        missing = number + 1 - len(self._offsets)
        if missing > 0:
            # By more than is wanted, so that the copying stays small.
            more = missing + len(self._offsets) // 8 + 1024
            self._offsets.frombytes(bytes(8 * more))
        self._offsets[number] = offset
        self.num_rows += 1
        self.num_errors += is_error

    def _write(self, line: bytes) -> None:
        done = 0
        try:
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as error:
            # Whole lines alone stay, so that the next run has nothing to repair.
            os.ftruncate(self._fd, self._size)
            raise JobError(self._lost(error)) from error
        self._size += len(line)

    def sync_if_due(self) -> None:
        """Syncs where SYNC_ROWS rows or SYNC_S seconds have passed."""
        is_late = time.monotonic() - self._synced_s >= SYNC_S
        if self._num_unsynced >= SYNC_ROWS or (self._num_unsynced and is_late):
            self.sync()

    def sync(self) -> None:
        """Brings what was appended to the disk.

        Raises:
          JobError: the disk fails.
        """
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise JobError(self._lost(error)) from error
        self._num_unsynced, self._synced_s = 0, time.monotonic()

    def _lost(self, error: OSError) -> str:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "no room is left for" if is_full else "cannot write"
        return (
            f"{what} {self._path}: {error.strerror}; the {self.num_rows} rows in it "
            f"are safe: make room and run the same command again"
        )

    def records(self) -> Iterator[Entry]:
        """The finished rows in the order of their numbers.

        Raises:
          JobError: a line has changed since it was read or written.
        """
        with open(self._fd, "rb", closefd=False) as file:
            for number, offset in enumerate(self._offsets):
                if offset == 0:
                    continue
                file.seek(offset)
                entry = parse_line(file.readline())
                if entry is None or entry.number != number:
                    raise JobError(
                        f"{self._path}: the line of row {number} was damaged while the "
                        f"job ran; run the same command again, which computes it anew"
                    )
                yield entry

    def finish(self, receipt: dict[str, Any]) -> None:
        """Replaces the rows by a receipt, in one step; the output has landed."""
        path = f"{self._path}.partial"
        assert self.header is not None
        lines = journal_line(0, _dumped(self.header))
        lines += journal_line(0, _dumped({"done": receipt}))
        write_whole(path, lambda write: write(lines))
        os.replace(path, self._path)
        sync_folder(self._path)

    def close(self) -> None:
        """Lets the lock go; a journal that says nothing is removed."""
        if self._size == 0 and os.fstat(self._fd).st_size == 0:
            os.unlink(self._path)
        os.close(self._fd)


def write_whole(path: str, fill: Callable[[Callable[[bytes], Any]], None]) -> None:
    """Writes and syncs a file; where that fails, nothing of it stays."""
    try:
        with open(path, "wb", buffering=1 << 20) as file:
            fill(file.write)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        if os.path.exists(path):
            os.unlink(path)
        raise


def sync_folder(path: str) -> None:
    """Makes a rename to `path` outlive the machine."""
    handle = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_locked(path: str) -> int:
    while True:
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise JobError(
                f"{path}: another process is at this job; wait for its end, or name "
                f"another --output"
            ) from None
        except BaseException:
            os.close(handle)
            raise
        # A job that ended in between has put a receipt in the place of this file.
        try:
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)


def _fields(entry: Entry) -> dict[str, Any]:
    value = json.loads(entry.record)
    assert isinstance(value, dict)
    return value


def _dumped(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
