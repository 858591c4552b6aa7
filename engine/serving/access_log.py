"""The access log: one JSON object per call and line, without any text of it. No jax."""

import contextlib
import datetime
import json
import logging
import logging.handlers
import queue
import sys
from collections.abc import Iterator

from headrace.engine.serving.calls import CallRecord


class AccessLog:
    """Writes a line when a call is over.

    Its fields: time (arrival, UTC), request_id, tenant, method, code, finish_reason,
    prompt_tokens, cached_tokens, output_tokens, and in seconds queue_s, ttft_s (from
    arrival to the first token) and total_s; null where it never came to that. No
    message: it may quote the caller. A call without a known key has peer, its address,
    and untold besides: how many such calls since the last line had none (refusals.py).

    Args:
      logger: gets the lines.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def on_call(self, record: CallRecord) -> None:
        """Writes the line of a call."""
        self._logger.info("%s", json.dumps(_fields(record)))


def _fields(record: CallRecord) -> dict[str, str | int | float | None]:
    stranger: dict[str, str | int | float | None] = {}
    if record.peer is not None:
        stranger = {"peer": record.peer, "untold": record.num_untold}
    arrival = datetime.datetime.fromtimestamp(record.wall_s, datetime.UTC)

    def since_arrival(time_s: float | None) -> float | None:
        return None if time_s is None else round(time_s - record.arrival_s, 6)

    return {
        "time": arrival.isoformat(timespec="milliseconds"),
        "request_id": record.request_id,
        "tenant": record.tenant,
        "method": record.method,
        "code": record.code,
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_s": since_arrival(record.admitted_s),
        "ttft_s": since_arrival(record.first_token_s),
        "total_s": since_arrival(record.finished_s),
        **stranger,
    }


@contextlib.contextmanager
def opened(path: str) -> Iterator[AccessLog]:
    """An access log that a thread writes, so that no call waits for a disk.

    Args:
      path: file to append to, opened anew when it was moved away; "-" is stderr.

    Raises:
      ValueError: the file cannot be opened.
    """
    try:
        target: logging.Handler = (
            logging.StreamHandler(sys.stderr)
            if path == "-"
            else logging.handlers.WatchedFileHandler(path, encoding="utf-8")
        )
    except OSError as error:
        raise ValueError(f"access_log {path}: {error.strerror or error}") from None
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger = logging.Logger("headrace.access", logging.INFO)  # of nobody's settings
    logger.addHandler(logging.handlers.QueueHandler(lines))
    listener = logging.handlers.QueueListener(lines, target)
    listener.start()
    try:
        yield AccessLog(logger)
    finally:
        listener.stop()  # after the last line
        target.close()
