"""What a run of requests measured, from one record per request. Pure, no clock.

Names are those of `vllm bench serve`. Times, rates and tokens are of the requests that
succeeded; the others are counted by reason.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

OK = "ok"
LIMITS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """How one request went; seconds of one clock.

    Attributes:
      sent_s, ended_s: when it was sent, and when its stream had ended or failed.
      events: (time, tokens) of each piece that brought tokens.
      prompt_tokens: as far as the server or we know; 0 else.
      status: OK, or why it failed.
      late_s: how much later than planned it was sent.
    """

    sent_s: float
    ended_s: float
    events: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int = 0
    status: str = OK
    late_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it gave all it was asked for; at least one token."""
        return self.status == OK

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(tokens for _, tokens in self.events)

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.events[0][0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From sending to the last token."""
        return self.events[-1][0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with a single one."""
        rest = self.output_tokens - 1
        return (self.e2el_s - self.ttft_s) / rest if rest > 0 else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces; a piece of several tokens is the end of one gap."""
        return [b - a for (a, _), (b, _) in itertools.pairwise(self.events)]


def parse_goodput(text: str | None) -> dict[str, float]:
    """Reads "ttft:500,tpot:50": most milliseconds of each, for a request to be good.

    Raises:
      ValueError: another name, one twice, or a limit that is not above 0.
    """
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text else []:
        name, _, value = part.strip().partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in LIMITS or name in limits or not limit > 0:
            raise ValueError(
                f"goodput must be name:milliseconds with each of {LIMITS} once at most "
                f"and milliseconds above 0, got {part.strip()!r}"
            )
        limits[name] = limit
    return limits


def is_good(record: Record, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request succeeded within all limits; one token has no TPOT to miss."""
    if not record.is_ok:
        return False
    found_s = {
        "ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s
    }  # fmt: skip
    return all(found_s[name] * 1e3 <= limit for name, limit in limits_ms.items())


def peak_concurrency(records: Sequence[Record]) -> int:
    """Most requests under way at once; one that ends as another begins is not."""
    edges = [(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records]
    running = itertools.accumulate(change for _, change in sorted(edges))
    return max(running, default=0)


def peak_output_per_s(records: Sequence[Record], begin_s: float) -> int:
    """Most tokens that came within one whole second since `begin_s`."""
    seconds: collections.Counter[int] = collections.Counter()
    for record in records:
        for time_s, tokens in record.events:
            seconds[int(time_s - begin_s)] += tokens
    return max(seconds.values(), default=0)


def latency_stats(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in milliseconds; None without values.

    Percentiles interpolate linearly; the deviation is that of the values themselves.
    """
    keys = ("mean", "median", "std", "p50", "p95", "p99")
    if not values_s:
        return {f"{key}_{name}_ms": None for key in keys}
    values_ms = np.array(values_s) * 1e3
    p50, p95, p99 = np.percentile(values_ms, (50, 95, 99)).tolist()
    found = (float(values_ms.mean()), p50, float(values_ms.std()), p50, p95, p99)
    pairs = zip(keys, found, strict=True)
    return {f"{key}_{name}_ms": round(value, 3) for key, value in pairs}


def summary(
    records: Sequence[Record], limits_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """All that is told of a run, by vLLM's names and, from tokens_per_gap on, ours.

    Args:
      records: of all requests, at least one.
      limits_ms: of `parse_goodput`; empty or None has no goodput.
    """
    good = [record for record in records if record.is_ok]
    begin_s = min(record.sent_s for record in records)
    duration_s = max(record.ended_s for record in records) - begin_s
    num_in = sum(record.prompt_tokens for record in good)
    num_out = sum(record.output_tokens for record in good)
    failed = collections.Counter(r.status for r in records if not r.is_ok)
    gaps = [gap for record in good for gap in record.itl_s]
    after_first = sum(record.output_tokens - record.events[0][1] for record in good)

    def rate(count: int) -> float | None:
        return round(count / duration_s, 4) if duration_s > 0 else None

    line: dict[str, Any] = {
        "duration": round(duration_s, 4),
        "completed": len(good),
        "failed": failed.total(),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": rate(len(good)),
        "request_goodput": None,
        "output_throughput": rate(num_out),
        "total_token_throughput": rate(num_in + num_out),
        "max_output_tokens_per_s": peak_output_per_s(good, begin_s),
        "max_concurrent_requests": peak_concurrency(records),
    }
    if limits_ms:
        line["request_goodput"] = rate(sum(is_good(r, limits_ms) for r in records))
    tpot_s = [r.tpot_s for r in good if r.tpot_s is not None]
    line |= latency_stats("ttft", [record.ttft_s for record in good])
    line |= latency_stats("tpot", tpot_s)
    line |= latency_stats("itl", gaps)
    line |= latency_stats("e2el", [record.e2el_s for record in good])
    return line | {
        "tokens_per_gap": round(after_first / len(gaps), 4) if gaps else None,
        "max_late_ms": round(max(record.late_s for record in records) * 1e3, 3),
        "failed_by_reason": dict(failed),
        "goodput_limits_ms": dict(limits_ms or {}),
    }
