"""What a benchmark cost this process, and what other programs took meanwhile."""

import os
import threading
import time

import psutil

_EVERY_S = 0.25


class Monitor:
    """Peak memory and busy cores between `start` and `stop`.

    Attributes (after `stop`):
      wall_s: time between them.
      peak_rss_bytes: largest resident memory of this process and its children, seen
        every quarter of a second from the building of the monitor on.
      own_cores, other_cores: cores kept busy on average, by us and by others.
      load_before: the machine's one-minute load average when built.
    """

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._done = threading.Event()
        self.peak_rss_bytes = 0
        self.load_before = os.getloadavg()[0]
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _family(self) -> list[psutil.Process]:
        return [self._me, *self._me.children(recursive=True)]

    def _watch(self) -> None:
        while True:
            rss = 0
            for process in self._family():
                try:
                    rss += process.memory_info().rss
                except psutil.Error:
                    pass  # a child that ended meanwhile
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
            if self._done.wait(_EVERY_S):
                return

    def start(self) -> None:
        """Begins the timed part."""
        self._own_s, self._busy_s = self._own_cpu_s(), _machine_busy_s()
        self._begin_s = time.perf_counter()

    def stop(self) -> None:
        """Ends the timed part and fills the attributes."""
        self.wall_s = time.perf_counter() - self._begin_s
        own = self._own_cpu_s() - self._own_s
        busy = _machine_busy_s() - self._busy_s
        self.own_cores = own / self.wall_s
        self.other_cores = max(0.0, busy - own) / self.wall_s
        self._done.set()
        self._thread.join()

    def _own_cpu_s(self) -> float:
        total = 0.0
        for process in self._family():
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.Error:
                pass  # a child that ended meanwhile
        return total


def _machine_busy_s() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
    return sum(times) - idle
