"""Runs the rows of an offline job and keeps them: window, journal, merge.

    input lines -> window (longest first) -> engine -> journal
                            all rows there -> merge -> output, by rename

Memory: a window of rows, twice the engine's slots of open ones, 8 bytes a line.
"""

import collections
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tqdm

from headrace.scripts.batch_engine import RowEngine
from headrace.scripts.batch_journal import (
    JobError,
    Journal,
    sync_folder,
    write_whole,
)
from headrace.scripts.batch_records import RecordStyle, error_record, failed, record_of
from headrace.scripts.batch_rows import (
    BadRow,
    Line,
    Row,
    is_of_shard,
    parse_row,
    read_lines,
)

# Lines that a window holds at most, where they are long ones.
WINDOW_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a job is about, besides its engine.

    Attributes:
      input, output: paths.
      defaults: fields of SamplingParams, for plain rows that do not say otherwise.
      window: rows among which the longest go first.
      max_line_bytes: longest line that is read.
      shard: (i, n), see `is_of_shard`.
    """

    input: str
    output: str
    defaults: Mapping[str, Any]
    window: int = 1024
    max_line_bytes: int = 16 << 20
    shard: tuple[int, int] = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputFacts:
    """What a first reading of the input tells; `num_rows` is the shard's."""

    sha256: str
    num_rows: int


def scan_input(settings: JobSettings) -> InputFacts:
    """Reads the input once, in bounded memory.

    Raises:
      OSError: it cannot be read.
    """
    digest, num_rows = hashlib.sha256(), 0
    with open(settings.input, "rb") as file:
        for line in read_lines(file, settings.max_line_bytes, digest):
            num_rows += is_of_shard(line.number, settings.shard)
    return InputFacts(sha256=digest.hexdigest(), num_rows=num_rows)


class Job:
    """A job under way.

    Args:
      settings: of the job.
      facts: of its input.
      journal: loaded, with the job's header.
      style: of its records.
    """

    def __init__(
        self,
        settings: JobSettings,
        facts: InputFacts,
        journal: Journal,
        style: RecordStyle,
    ) -> None:
        self.settings, self.facts = settings, facts
        self.journal, self._style = journal, style
        self.num_computed = 0

    def run(
        self,
        engine: RowEngine,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        shows_progress: bool | None = False,
    ) -> bool:
        """Computes the rows that the journal lacks.

        Args:
          engine: idle.
          should_stop: asked every turn; then open rows are given up.
          shows_progress: on standard error; None is where that is a terminal.

        Returns:
          Whether all rows are in the journal.

        Raises:
          JobError: the engine or the disk has failed, or the input has changed.
        """
        bar = tqdm.tqdm(
            total=self.facts.num_rows,
            initial=self.journal.num_rows,
            disable=None if shows_progress is None else not shows_progress,
            unit="row",
            dynamic_ncols=True,
        )
        try:
            with bar, contextlib.closing(self._missing()) as lines:
                return self._run(engine, lines, should_stop, bar)
        finally:
            self.journal.sync()

    def _run(
        self,
        engine: RowEngine,
        lines: Iterator[Line],
        should_stop: Callable[[], bool],
        bar: Any,
    ) -> bool:
        window: collections.deque[Row] = collections.deque()
        while not should_stop():
            # The next window is read before the last rows of this one have ended.
            while engine.num_open < engine.max_open:
                if not window:
                    window.extend(self._take(lines, bar, should_stop))
                if not window:
                    break
                row = window.popleft()
                try:
                    engine.submit(row)
                except ValueError as error:
                    self._keep_error(failed(row, str(error)), bar)
            if not engine.num_open:
                return not should_stop()
            for row, output in engine.turn():
                record, is_error = record_of(row, output, self._style)
                self._keep(row.line, record, is_error, bar)
            _show_speed(bar, engine)
            self.journal.sync_if_due()
        return False

    def _missing(self) -> Iterator[Line]:
        """This shard's lines that the journal lacks; checks the bytes at the end."""
        settings, digest = self.settings, hashlib.sha256()
        with open(settings.input, "rb") as file:
            for line in read_lines(file, settings.max_line_bytes, digest):
                is_here = is_of_shard(line.number, settings.shard)
                if is_here and not self.journal.has(line.number):
                    yield line
        if digest.hexdigest() != self.facts.sha256:
            raise JobError(
                f"{settings.input} has changed while the job ran; nothing of it is in "
                f"{settings.output}. --restart begins anew"
            )

    def _take(
        self, lines: Iterable[Line], bar: Any, should_stop: Callable[[], bool]
    ) -> list[Row]:
        """The next window, the longest rows first; empty at the end of the input.

        Rows that cannot run are kept as errors on the way.
        """
        rows: list[Row] = []
        num_bytes = 0
        for line in lines:
            row = parse_row(line, self.settings.defaults, self._style.job)
            if isinstance(row, BadRow):
                self._keep_error(row, bar)
            else:
                rows.append(row)
                num_bytes += len(line.text or b"")
            is_full = len(rows) >= self.settings.window or num_bytes > WINDOW_BYTES
            if is_full or should_stop():
                break
        # Rows of one size by line, so that an order does not hang on chance.
        return sorted(rows, key=lambda row: (-row.size, row.line))

    def _keep_error(self, row: BadRow, bar: Any) -> None:
        self._keep(row.line, error_record(row, self._style), True, bar)

    def _keep(self, number: int, record: bytes, is_error: bool, bar: Any) -> None:
        self.journal.append(number, record, is_error)
        self.num_computed += 1
        bar.update(1)

    def merge(self) -> None:
        """Puts the journal's rows into the output, in the order of the input.

        The output appears under its name whole; then the journal shrinks to a receipt.

        Raises:
          JobError: rows are missing, or there is no room; the journal is as it was.
        """
        journal, output = self.journal, self.settings.output
        if journal.num_rows != self.facts.num_rows:
            raise JobError(
                f"the journal has {journal.num_rows} of {self.facts.num_rows} rows"
            )
        digest = hashlib.sha256()

        def fill(write: Callable[[bytes], Any]) -> None:
            for entry in journal.records():
                line = entry.record + b"\n"
                digest.update(line)
                write(line)

        try:
            write_whole(partial_path(output), fill)
            os.replace(partial_path(output), output)
            sync_folder(output)
            receipt = {
                "num_rows": journal.num_rows,
                "num_errors": journal.num_errors,
                "sha256": digest.hexdigest(),
            }
            journal.finish(receipt)
        except OSError as error:
            raise JobError(
                f"cannot write {output}: {error.strerror}; all {journal.num_rows} rows "
                f"are safe in the journal: make room for the file beside it and run "
                f"the same command again"
            ) from error


def partial_path(output: str) -> str:
    """What the output is called until it is whole."""
    return f"{output}.partial"


def _show_speed(bar: Any, engine: RowEngine) -> None:
    if not bar.disable:
        elapsed = max(bar.format_dict["elapsed"], 1e-9)
        bar.set_postfix_str(f"{engine.num_tokens / elapsed:.1f} tokens/s", False)
