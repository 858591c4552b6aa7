"""Runs random requests for minutes and watches that memory stays flat.

    python -m headrace.scripts.soak --config=tiny --minutes=20

Requests arrive at random with shared prefixes, several tenants, time limits, and
cancels, in a pool too small for all of them. Prints a line a minute. Exits with 1 when
a request was lost, a page is still held at the end, or memory has grown by more than
--max_growth_mb after the first quarter.
"""

import random
import sys
import time
from typing import Any

import psutil
from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.engine.sampling_params import SamplingParams
from headrace.scripts import engine_flags
from headrace.scripts.verify_exactness import tight

FLAGS = flags.FLAGS

flags.DEFINE_float("minutes", 20.0, "How long requests arrive.", lower_bound=0.01)
flags.DEFINE_float("max_growth_mb", 64.0, "Growth of memory that fails the run.")
flags.DEFINE_integer("open_requests", 32, "Requests kept open.", lower_bound=1)


class Soak:
    """Keeps an engine busy with random requests.

    Args:
      llm: to be kept busy.
      open_requests: how many at a time.
    """

    def __init__(self, llm: Any, open_requests: int) -> None:
        self._loop, self._open_requests = llm._loop, open_requests
        self._vocab = llm.model_config.vocab_size
        self._longest = llm.engine_config.max_context_len // 2
        self._rng = random.Random(1)
        self._heads = [self._ids(self._longest // 2) for _ in range(4)]
        self._states: list[Any] = []
        self.num_sent = self.num_ended = 0

    def turn(self, *, takes_new: bool) -> None:
        """Some requests come, some are cancelled, the engine takes a turn."""
        rng = self._rng
        while takes_new and len(self._states) < self._open_requests:
            head = rng.choice(self._heads) if rng.random() < 0.5 else []
            state = self._loop.submit(
                head + self._ids(rng.randint(1, self._longest // 2)),
                SamplingParams(
                    temperature=rng.choice([0.0, 0.8]),
                    max_tokens=rng.randint(1, self._longest // 2),
                    logprobs=rng.choice([None, 2]),
                ),
                tenant=rng.choice([None, "a", "b"]),
                deadline_s=rng.choice([None, None, None, 1.0]),
            )
            self._states.append(state)
            self.num_sent += 1
        if self._states and rng.random() < 0.02:
            self._loop.cancel(rng.choice(self._states))
        self._loop.turn()
        ended = [state for state in self._states if state.is_finished]
        self._states = [state for state in self._states if not state.is_finished]
        self.num_ended += len(ended)
        self._loop.drop(*ended)

    @property
    def is_idle(self) -> bool:
        """No request is open and no step unread."""
        return not self._states and not self._loop.has_work

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(count)]


def rss_bytes() -> int:
    """Memory of this process."""
    return psutil.Process().memory_info().rss


def run() -> int:
    """Returns the exit code."""

    def small(engine: EngineConfig) -> EngineConfig:
        return tight(engine, 16)

    llm = engine_flags.build_llm(small)
    soak = Soak(llm, FLAGS.open_requests)
    begin_s = told_s = time.monotonic()
    end_s, floor = begin_s + 60 * FLAGS.minutes, None
    while (now_s := time.monotonic()) < end_s:
        soak.turn(takes_new=True)
        if floor is None and now_s - begin_s > 15 * FLAGS.minutes:
            floor = rss_bytes()
        if now_s - told_s > 60:
            told_s = now_s
            print(f"{soak.num_ended} ended, {rss_bytes() / 1e6:.0f} MB", flush=True)
    while not soak.is_idle:
        soak.turn(takes_new=False)
    growth_mb = (rss_bytes() - (floor or 0)) / 1e6
    stats = llm.stats()
    held = stats["gauges"]["kv_cache_usage_perc"]
    lost = soak.num_sent - soak.num_ended
    print(
        f"{soak.num_sent} sent, {lost} lost, {held:.3f} of the pool held, "
        f"{stats['counters']['num_preemptions']} preemptions, grown by "
        f"{growth_mb:.1f} MB after the first quarter"
    )
    if lost or held or growth_mb > FLAGS.max_growth_mb:
        print("error: something was lost, held, or memory has grown", file=sys.stderr)
        return 1
    return 0


def main(_: list[str]) -> int:
    """Returns the exit code."""
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
