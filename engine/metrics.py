"""What the engine counts: counters, gauges and histograms by vLLM's names. No jax.

The names lack vLLM's prefix, which the exporter adds. The loop tells each event once,
to one method; that method says what it feeds, and no other feeds that. Times are
seconds of the engine's clock. One thread writes: the loop's.
"""

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from headrace.engine.outputs import FinishReason

# fmt: off
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 640, 2560,
)
TOKEN_GAP_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
    20, 40, 80,
)
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680,
)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EFFICIENCY_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
COUNTERS = (
    "prompt_tokens", "generation_tokens", "prompt_tokens_cached",
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
)
# fmt: on


class Histogram:
    """Counts by upper bound: bucket i is (bounds[i - 1], bounds[i]], the last open."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Starts empty; ValueError unless the bounds are finite and ascend strictly."""
        ascends = all(low < high for low, high in itertools.pairwise(bounds))
        if not bounds or not ascends or not all(map(math.isfinite, bounds)):
            raise ValueError(f"bounds must be finite and ascending, got {bounds!r}")
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds a finite `value`, `count` times over."""
        assert math.isfinite(value) and count >= 0, (value, count)
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += float(value) * count

    def snapshot(self) -> dict[str, Any]:
        """What Prometheus reads: "sum" and "count" of all values, and "buckets".

        These are {upper bound as text: number of values up to it}; the last is "+Inf".
        """
        totals = [int(total) for total in itertools.accumulate(self._counts)]
        buckets = dict(zip([*map(str, self._bounds), "+Inf"], totals, strict=True))
        return {"buckets": buckets, "sum": float(self._sum), "count": totals[-1]}

    def quantile(self, q: float) -> float | None:
        """Estimates a quantile by linear interpolation; ValueError unless 0 <= q <= 1.

        As in Prometheus, the first bucket starts at 0 (unless its bound is below), and
        a quantile in the open bucket is the largest bound. None without values.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q must be in [0, 1], got {q}")
        below, rank = 0, q * sum(self._counts)
        low = min(0.0, self._bounds[0])
        for high, count in zip(self._bounds, self._counts, strict=False):
            if count and below + count >= rank:
                return low + (high - low) * (rank - below) / count
            below, low = below + count, high
        return self._bounds[-1] if self._counts[-1] else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What the loop knows of one step.

    Attributes:
      prefill_tokens: prompt tokens computed: those again after a preemption included,
        cached ones and padding not.
      decode_rows: rows that decoded for a live request.
      decode_bucket_rows: rows of the compiled decode; None in a step without one.
      output_tokens: tokens received for requests, each one's first included.
    """

    prefill_tokens: int = 0
    decode_rows: int = 0
    decode_bucket_rows: int | None = None
    output_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.prefill_tokens >= 0 and self.output_tokens >= 0
        assert 0 <= self.decode_rows <= (self.decode_bucket_rows or 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """A request that ended: seconds of the engine's clock, and tokens.

    Attributes:
      admitted_s: when it first left the queue; None if it never ran.
      first_token_s: None if it gave no token.
      finished_s: when its last token came, or when it was aborted.
      max_tokens: most output tokens it was allowed.
    """

    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    finish_reason: FinishReason


class Metrics:
    """All metrics of one engine since its start; `histograms` by name."""

    def __init__(
        self,
        *,
        log_interval_s: float = 10.0,
        max_context_len: int = 131_072,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts at zero; ValueError if an interval or length is not positive.

        Args:
          log_interval_s: least time between two log lines, above 0.
          max_context_len: tokens; where the buckets of request lengths end.
          clock: read once: there the first log line's interval begins.
        """
        if not log_interval_s > 0:
            raise ValueError(f"log_interval_s must be above 0, got {log_interval_s}")
        self.histograms = _histograms(max_context_len)
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._finished: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._prefill_tokens = 0
        self._log_interval_s = log_interval_s
        self._logged_s, self._logged = clock(), self._progress()

    def on_admit(
        self, prompt_tokens: int, cached_tokens: int, queried_tokens: int
    ) -> None:
        """A request leaves the queue for the first time, not after a preemption.

        Feeds `prompt_tokens*` and `prefix_cache_*`: its whole prompt, the part found in
        the prefix cache, and the part looked up there (0 if it bypasses the cache).
        """
        assert 0 <= cached_tokens <= queried_tokens <= prompt_tokens
        self._counters["prompt_tokens"] += prompt_tokens
        self._counters["prompt_tokens_cached"] += cached_tokens
        self._counters["prefix_cache_queries"] += queried_tokens
        self._counters["prefix_cache_hits"] += cached_tokens

    def on_preempt(self) -> None:
        """A running request goes back to the queue. Feeds `num_preemptions`."""
        self._counters["num_preemptions"] += 1

    def on_step(self, facts: StepFacts) -> None:
        """A step is over.

        Feeds `generation_tokens`, `iteration_tokens_total` (if the step had tokens)
        and `batch_efficiency` (if it had a decode).
        """
        self._prefill_tokens += facts.prefill_tokens
        self._counters["generation_tokens"] += facts.output_tokens
        if tokens := facts.prefill_tokens + facts.output_tokens:
            self.histograms["iteration_tokens_total"].observe(tokens)
        if facts.decode_bucket_rows is not None:
            efficiency = facts.decode_rows / facts.decode_bucket_rows
            self.histograms["batch_efficiency"].observe(efficiency)

    def on_first_token(self, since_arrival_s: float) -> None:
        """A request's first token came. Feeds `time_to_first_token_seconds`."""
        self.histograms["time_to_first_token_seconds"].observe(since_arrival_s)

    def on_tokens(self, gap_s: float, num_rows: int) -> None:
        """`num_rows` requests each got a token, `gap_s` after their one before.

        Feeds `inter_token_latency_seconds`.
        """
        self.histograms["inter_token_latency_seconds"].observe(gap_s, num_rows)

    def on_finish(self, times: RequestTimes) -> None:
        """A request ended, for whatever reason.

        Feeds `request_success`, `e2e_request_latency_seconds` and `request_*`: only the
        queue time if it never ran, no prefill and decode times without a token, no time
        per output token with fewer than two.
        """
        self._finished[times.finish_reason] += 1
        for name, value in _values_of(times).items():
            self.histograms[name].observe(value)

    def snapshot(self, running: int, waiting: int, kv_usage: float) -> dict[str, Any]:
        """Everything, ready for JSON.

        Args:
          running, waiting: requests.
          kv_usage: part of the KV cache in use, in [0, 1].

        Returns:
          "counters": {name: count}, `request_success` being {reason: count};
          "gauges": {name: value}; "histograms": {name: `Histogram.snapshot`}.
        """
        assert 0 <= kv_usage <= 1, kv_usage
        counters: dict[str, Any] = {k: int(v) for k, v in self._counters.items()}
        counters["request_success"] = dict(self._finished)
        gauges = {
            "num_requests_running": int(running),
            "num_requests_waiting": int(waiting),
            "kv_cache_usage_perc": float(kv_usage),
        }
        histograms = {k: h.snapshot() for k, h in self.histograms.items()}
        return {"counters": counters, "gauges": gauges, "histograms": histograms}

    def log_line(
        self, now_s: float, running: int, waiting: int, kv_usage: float
    ) -> str | None:
        """A line for people, at most one per `log_interval_s`; else None.

        Also None if nothing was counted in the interval; then a new one begins. Prompt
        tokens are those computed (`StepFacts`); the hit rate is since the start.
        Arguments as in `snapshot`.
        """
        elapsed_s = now_s - self._logged_s
        if elapsed_s < self._log_interval_s:
            return None
        before, self._logged = self._logged, self._progress()
        self._logged_s = now_s
        if self._logged == before:
            return None
        prompt, output = ((self._logged[i] - before[i]) / elapsed_s for i in (0, 1))
        queries = self._counters["prefix_cache_queries"]
        hit_rate = self._counters["prefix_cache_hits"] / queries if queries else 0.0
        return (
            f"prompt {prompt:.1f} tokens/s, generation {output:.1f} tokens/s, "
            f"running {running}, waiting {waiting}, KV cache {kv_usage:.1%}, "
            f"prefix hits {hit_rate:.1%}"
        )

    def _progress(self) -> tuple[int, ...]:
        """Prompt tokens computed and output tokens, then all counts."""
        tokens = (self._prefill_tokens, self._counters["generation_tokens"])
        return (*tokens, *self._counters.values(), *self._finished.values())


def _histograms(max_context_len: int) -> dict[str, Histogram]:
    """An empty histogram per name."""
    if max_context_len < 1:
        raise ValueError(f"max_context_len must be at least 1, got {max_context_len}")
    decades = (10**power for power in range(len(str(max_context_len))))
    lengths = (step * decade for decade in decades for step in (1, 2, 5))
    length_bounds = [length for length in lengths if length <= max_context_len]
    bounds: dict[str, Sequence[float]] = {
        "time_to_first_token_seconds": FIRST_TOKEN_BOUNDS_S,
        "inter_token_latency_seconds": TOKEN_GAP_BOUNDS_S,
        "request_time_per_output_token_seconds": TOKEN_GAP_BOUNDS_S,
        "e2e_request_latency_seconds": REQUEST_BOUNDS_S,
        "iteration_tokens_total": STEP_TOKEN_BOUNDS,
        "batch_efficiency": EFFICIENCY_BOUNDS,
    }
    for phase in ("queue", "prefill", "decode", "inference"):
        bounds[f"request_{phase}_time_seconds"] = REQUEST_BOUNDS_S
    for tokens in ("prompt_tokens", "generation_tokens", "params_max_tokens"):
        bounds[f"request_{tokens}"] = length_bounds
    return {name: Histogram(values) for name, values in bounds.items()}


def _values_of(times: RequestTimes) -> dict[str, float]:
    """What each histogram gets of one request that ended."""
    end_s, admitted_s, first_s = times.finished_s, times.admitted_s, times.first_token_s
    values = {"e2e_request_latency_seconds": end_s - times.arrival_s}
    if admitted_s is None:
        return values | {"request_queue_time_seconds": end_s - times.arrival_s}
    values["request_queue_time_seconds"] = admitted_s - times.arrival_s
    values["request_inference_time_seconds"] = end_s - admitted_s
    values["request_prompt_tokens"] = times.num_prompt_tokens
    values["request_generation_tokens"] = times.num_output_tokens
    values["request_params_max_tokens"] = times.max_tokens
    if first_s is None:
        return values
    values["request_prefill_time_seconds"] = first_s - admitted_s
    values["request_decode_time_seconds"] = end_s - first_s
    if times.num_output_tokens > 1:
        per_token_s = (end_s - first_s) / (times.num_output_tokens - 1)
        values["request_time_per_output_token_seconds"] = per_token_s
    return values
