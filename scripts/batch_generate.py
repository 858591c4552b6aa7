"""Offline jobs: JSONL in, JSONL out in the same order; killed at any moment, resumed.

    python -m headrace.scripts.batch_generate --input=in.jsonl --output=out.jsonl

Rows are OpenAI's batch format or plain (batch_rows.py). A row that is wrong or fails
becomes an error row that names its line; blank lines give no row; a `custom_id` may
come twice, and `id` tells the rows apart. Finished rows go to OUT.journal
(batch_journal.py). The same command goes on where it was, with the rows that the
journal lacks, and the finished file has the bytes of a run that was never interrupted;
with --numerics=fast it has the same rows, not the same bytes. A job whose fingerprint
(batch_fingerprint.py) has changed is refused. When the file has landed, the journal is
a receipt of two lines. Exit codes:

    0  done     1  refused or failed; finished rows are kept
    3  done, with error rows     4  interrupted (SIGINT, SIGTERM); run it again
"""

import contextlib
import datetime
import hashlib
import os
import signal
import stat
import sys
from typing import Any

from absl import app, flags

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.strict_json import parse_object
from headrace.scripts import batch_fingerprint, engine_flags
from headrace.scripts.batch_engine import LLMRows, RowEngine, pinned
from headrace.scripts.batch_job import (
    Job,
    JobSettings,
    partial_path,
    scan_input,
)
from headrace.scripts.batch_journal import JobError, Journal, write_whole
from headrace.scripts.batch_records import RecordStyle

FLAGS = flags.FLAGS
DONE, FAILED, DONE_WITH_ERRORS, INTERRUPTED = 0, 1, 3, 4

flags.DEFINE_string("input", None, "JSONL file of rows; a regular file, read twice.")
flags.DEFINE_string("output", None, "JSONL file that appears once it is whole.")
flags.DEFINE_string(
    "row_defaults",
    "{}",
    "JSON object of SamplingParams' fields, for plain rows that do not say otherwise.",
)
flags.DEFINE_bool("row_token_ids", False, "Plain rows list their output's token ids.")
flags.DEFINE_string(
    "chat_date",
    "2024-07-26",
    "What chat templates that ask for the date are told; not the clock's, since a job "
    "may go on tomorrow.",
)
flags.DEFINE_integer(
    "window", 1024, "Rows among which the longest go first.", lower_bound=1
)
flags.DEFINE_integer(
    "max_line_bytes", 16 << 20, "Longer lines become error rows.", lower_bound=1
)
flags.DEFINE_string("shards", "0/1", "I/N: only lines whose number mod N is I.")
flags.DEFINE_bool("restart", False, "Delete the journal's rows and begin anew.")
flags.DEFINE_bool("progress", True, "Rows, tokens/s and time left, on a terminal.")


class Stop:
    """SIGINT and SIGTERM: the first asks for an end, the second ends at once."""

    def __init__(self) -> None:
        self.is_asked = self.is_running = False

    def handle(self, number: int, frame: object) -> None:
        """The signal handler."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_asked = True
        if not self.is_running:
            raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Returns the exit code, see the header of this file."""
    if len(argv) > 1:
        _tell(f"error: only flags are taken, got {argv[1:]}")
        return FAILED
    return engine_flags.exit_code(run)


def run() -> int:
    """Runs the job that the flags describe; gives the exit code.

    Raises:
      ValueError: flags that make no sense.
      OSError: the input cannot be read, or nothing can be written beside the output.
    """
    settings, stop = _settings(), Stop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stop.handle) for number in numbers]
    try:
        with contextlib.closing(Journal(journal_path(settings.output))) as journal:
            return _run(settings, journal, stop)
    except JobError as error:
        _tell(f"error: {error}")
        return FAILED
    except KeyboardInterrupt:
        _tell("interrupted; the same command goes on")
        return INTERRUPTED
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def journal_path(output: str) -> str:
    """Where the journal of an output lies."""
    return f"{output}.journal"


def _run(settings: JobSettings, journal: Journal, stop: Stop) -> int:
    write_whole(partial_path(settings.output), lambda write: None)  # before the engine
    os.unlink(partial_path(settings.output))
    if FLAGS.restart:
        journal.restart()
    else:
        journal.load()
    if journal.header is None and os.path.exists(settings.output) and not FLAGS.restart:
        raise JobError(
            f"{settings.output} exists, and no journal beside it says that this job "
            f"wrote it; name another --output, or --restart to replace it"
        )
    known = scan_input(settings)
    facts = batch_fingerprint.early_facts(
        input_sha256=known.sha256, parameters=_parameters(settings)
    )
    _check_same(journal, facts, settings)
    stored = (journal.header or {}).get("facts", {}).get("engine")
    llm = engine_flags.build_llm(lambda config: pinned(config, stored))
    facts |= batch_fingerprint.engine_facts(llm)
    _check_same(journal, facts, settings)
    if journal.header is None:
        journal.begin({"facts": facts, "shard": list(settings.shard)})
    if llm.engine_config.numerics == "fast":
        _tell("numerics=fast: a resumed job gives the same rows, not the same bytes")
    style = RecordStyle(
        job=batch_fingerprint.fingerprint(facts),
        model=_model_name(),
        # Without a tokenizer a row's text is empty.
        has_token_ids=FLAGS.row_token_ids or llm.tokenizer is None,
    )
    engine = LLMRows(llm, _chat_date())
    return finish(Job(settings, known, journal, style), engine, stop)


def finish(job: Job, engine: RowEngine, stop: Stop) -> int:
    """From a journal that is open to the exit code; tells what was done."""
    journal, settings = job.journal, job.settings
    if journal.receipt is not None:
        _check_landed(settings.output, journal.receipt)
        errors = journal.receipt["num_errors"]
        _tell(f"done already: {journal.receipt['num_rows']} rows, {errors} errors")
        return DONE_WITH_ERRORS if errors else DONE
    if journal.damaged:
        _tell(
            f"{len(journal.damaged)} lines of the journal are damaged, the first is "
            f"line {journal.damaged[0]}; their rows are computed anew"
        )
    missing = job.facts.num_rows - journal.num_rows
    _tell(
        f"{job.facts.num_rows} rows: {journal.num_rows} in the journal, {missing} to "
        f"compute"
    )
    stop.is_running = True
    is_whole = job.run(
        engine,
        should_stop=lambda: stop.is_asked,
        shows_progress=None if FLAGS.progress else False,
    )
    done = f"computed {job.num_computed} rows, {engine.num_tokens} tokens"
    if not is_whole:
        _tell(
            f"interrupted: {done}; {journal.num_rows} of {job.facts.num_rows} are in "
            f"the journal, and the same command goes on"
        )
        return INTERRUPTED
    job.merge()
    _tell(f"done: {done}; {journal.num_errors} error rows; {settings.output}")
    return DONE_WITH_ERRORS if journal.num_errors else DONE


def _check_same(journal: Journal, facts: dict[str, Any], settings: JobSettings) -> None:
    """Whether the journal is of this job, as far as it is known yet."""
    if journal.header is None:
        return
    changed = batch_fingerprint.differences(
        journal.header | journal.header["facts"],
        facts | {"shard": list(settings.shard)},
    )
    if changed:
        raise JobError(
            f"{journal_path(settings.output)} is of another job. Changed: "
            f"{'; '.join(changed[:12])}. Run it as it was begun, name another "
            f"--output, or --restart to delete its {journal.num_rows} rows"
        )


def _check_landed(output: str, receipt: dict[str, Any]) -> None:
    try:
        with open(output, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        found = "missing"
    if found != receipt["sha256"]:
        raise JobError(
            f"this job is done, but {output} is gone or not what it wrote; --restart "
            f"computes it again"
        )


def _settings() -> JobSettings:
    for name in ("input", "output"):
        if not FLAGS[name].value:
            raise ValueError(f"--{name} must name a file")
    source, output = FLAGS.input, FLAGS.output
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise ValueError(f"--input must be a regular file: it is read twice: {source}")
    if os.path.isdir(output):
        raise ValueError(f"--output must name a file, and {output} is a folder")
    written = [output, partial_path(output), journal_path(output)]
    if os.path.realpath(source) in map(os.path.realpath, written):
        raise ValueError(f"--input and --output must be two files, got {source} twice")
    return JobSettings(
        input=source,
        output=output,
        defaults=_row_defaults(),
        window=FLAGS.window,
        max_line_bytes=FLAGS.max_line_bytes,
        shard=_shard(FLAGS.shards),
    )


def _row_defaults() -> dict[str, Any]:
    try:
        defaults = parse_object(FLAGS.row_defaults.encode())
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--row_defaults: {error}") from None
    return defaults


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shards must be I/N with I in [0, N), got {text!r}")
    return int(index), int(count)


def _chat_date() -> datetime.date:
    return datetime.date.fromisoformat(FLAGS.chat_date)


def _model_name() -> str:
    """What replies call the model; a path's last part, since files may move."""
    name = FLAGS.model or FLAGS.config or engine_flags.DEFAULT_MODEL
    return os.path.basename(os.path.normpath(name))


def _parameters(settings: JobSettings) -> dict[str, Any]:
    """The flags that shape records."""
    return {
        "row_defaults": settings.defaults,
        "row_token_ids": FLAGS.row_token_ids,
        "chat_date": _chat_date().isoformat(),
        "max_line_bytes": settings.max_line_bytes,
        "model_name": _model_name(),
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main)
