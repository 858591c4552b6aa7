"""Runs the parts of the self-check in a process of their own, and outlives it.

A kernel that reads where it may not takes the device from all that runs in its process,
and one that waits for ever cannot be interrupted. Either costs its own part; the others
go on in a new process. No jax.
"""

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable

from headrace.scripts import selfcheck_report
from headrace.scripts.selfcheck_report import Part, Record

# Seconds after which a part that still runs counts as hung, in this order.
PARTS = {
    "card": 90,
    "prefill_256": 100,
    "decode": 180,
    "prefill": 120,
    "bits": 120,
    "bandwidth": 120,
    "quantized": 120,
    "engine": 150,
    "step": 330,
}
# What may pass from the budget to the end of all.
_GRACE_S = 50.0
# Until a worker's first record: imports, and the first touch of the device.
_START_S = 150.0


class Supervisor:
    """Runs the parts in workers, one after the other, and keeps what they report.

    Args:
      command: of a worker that does some parts by a point in time.
      deadline_s: no part begins after it, in `time.time()` seconds.
      limits_s: of each part; None takes those of `PARTS`.

    Attributes:
      records: of all parts.
    """

    def __init__(
        self,
        command: Callable[[list[str], float, list[Record]], list[str]],
        deadline_s: float,
        limits_s: dict[str, float] | None = None,
    ) -> None:
        self._command, self._deadline_s = command, deadline_s
        self._limits_s = dict(PARTS) if limits_s is None else limits_s
        self.records: list[Record] = []

    def run(self, names: list[str]) -> None:
        """Every name has a last record afterwards."""
        left = list(names)
        while left:
            if time.time() > self._deadline_s:
                for name in left:
                    self._end(name, selfcheck_report.OUT_OF_TIME)
                return
            left = self._one_worker(left)

    def _one_worker(self, names: list[str]) -> list[str]:
        """Runs a worker to its end; the parts that it left."""
        command = self._command(names, self._deadline_s, self.records)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, errors="replace"
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        current, left = None, list(names)
        limit_s, begin_s = time.time() + _START_S, time.time()
        while True:
            stop_s = min(limit_s, self._deadline_s + _GRACE_S)
            try:
                line = lines.get(timeout=max(0.0, stop_s - time.time()))
            except queue.Empty:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                why = f"hung: nothing more after {time.time() - begin_s:.0f} s"
                return self._lose(current, left, why)
            if line is None:
                process.wait()
                if current is None and (not left or left != names):
                    return left
                why = f"its process ended with {process.returncode}"
                return self._lose(current, left, why)
            record = selfcheck_report.read_record(line)
            if record is None:
                print(line, flush=True)
                continue
            self.records.append(record)
            if record["kind"] == "begin":
                current, begin_s = record["part"], time.time()
                limit_s = begin_s + self._limits_s[current]
            elif record["kind"] == "end":
                current, limit_s = None, time.time() + _START_S
                left.remove(record["part"])

    def _lose(self, current: str | None, left: list[str], why: str) -> list[str]:
        """Books the part that was running; before the first one began, the first."""
        name = current or left[0]
        print(f"[{name}] {why}", flush=True)
        self._end(name, selfcheck_report.ERROR, why)
        return [other for other in left if other != name]

    def _end(self, name: str, status: str, error: str | None = None) -> None:
        Part(name, self.records.append).end(status, 0.0, error)


def _read(process: subprocess.Popen, lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)
