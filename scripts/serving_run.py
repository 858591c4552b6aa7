"""One run of a serving benchmark: a plan and a target in, records and a JSON line out.

facts of the target -> requests, shortened to it -> arrivals -> warm-up
    -> counters before, all requests, counters after -> summary
"""

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.scripts import serving_workloads
from headrace.scripts.serving_arrivals import gamma_arrivals, replayed
from headrace.scripts.serving_counters import server_facts
from headrace.scripts.serving_load import Load, watch
from headrace.scripts.serving_metrics import Record, summary
from headrace.scripts.serving_targets import Facts, RequestFailed, Target
from headrace.scripts.serving_workloads import Item, Shape

# Of a server that tells no vocabulary: no more than models of today have.
_VOCAB_SIZE = 32_000
_NUM_REQUESTS, _WARMUP = 100, "64:4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is sent, and when; see the flags of bench_serving.py.

    Attributes:
      workload, trace: the trace replaces the workload, and its times are kept.
      num_requests: None: all of a file, else 100.
      workload_seed: of prompts, lengths and times.
      shape: of synthetic workloads.
      vocab_size, num_slots: of the server, where it does not tell them.
      max_concurrency: most requests under way; None: no bound.
      request_rate: per second; None: the workload's times, or all at once.
      burstiness: shape of the Gamma distributed gaps.
      ignore_eos: a request fails unless its output has its full length.
      num_warmups: requests before those that count.
      request_timeout_s: of one request.
      watch_s: between two looks at the server's gauges.
      limits_ms: of goodput.
    """

    workload: str = "chat-short"
    trace: str | None = None
    num_requests: int | None = None
    workload_seed: int = 0
    shape: Shape = Shape()
    vocab_size: int | None = None
    num_slots: int | None = None
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    ignore_eos: bool = True
    num_warmups: int = 1
    request_timeout_s: float = 3600.0
    watch_s: float = 1.0
    limits_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before an engine's long start, rather than after it.
        if self.request_rate is not None:
            gamma_arrivals(0, self.request_rate, self.burstiness, 0)
            if self.trace is not None:
                raise ValueError("trace and request_rate must not both be given")
        for name in ("vocab_size", "num_slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.is_drawn:
            serving_workloads.synthetic(
                self.workload, 1, self.shape, vocab_size=_VOCAB_SIZE, seed=0
            )
        else:
            self.items(_VOCAB_SIZE)

    @property
    def is_drawn(self) -> bool:
        """Whether requests are drawn, rather than read from a file."""
        return self.trace is None and serving_workloads.is_synthetic(self.workload)

    def items(self, vocab_size: int) -> list[Item]:
        """The requests, as long as they are drawn or written.

        Raises:
          ValueError: an unknown workload, or a file that holds none.
        """
        options = {"vocab_size": vocab_size, "seed": self.workload_seed}
        if self.is_drawn:
            count = self.num_requests or _NUM_REQUESTS
            return serving_workloads.synthetic(
                self.workload, count, self.shape, **options
            )
        name = self.trace or self.workload
        return serving_workloads.read_items(name, self.num_requests, **options)

    def arrivals(self, items: Sequence[Item]) -> list[float]:
        """When the requests are due, seconds since the start.

        Raises:
          ValueError: a trace without times, or times out of order.
        """
        times_s = [item.arrival_s for item in items]
        if self.trace is not None and None in times_s:
            raise ValueError(f"request {times_s.index(None)} of the trace has no time")
        if self.is_replayed(items):
            return replayed([time_s for time_s in times_s if time_s is not None])
        rate = math.inf if self.request_rate is None else self.request_rate
        return gamma_arrivals(len(items), rate, self.burstiness, self.workload_seed)

    def is_replayed(self, items: Sequence[Item]) -> bool:
        """Whether requests come at the times that were recorded with them."""
        times_s = {item.arrival_s for item in items}
        differ = None not in times_s and len(times_s) > 1
        return self.request_rate is None and differ


async def measure(
    target: Target, plan: Plan
) -> tuple[list[Record], dict[str, Any], dict[str, str]]:
    """Runs a plan.

    Returns:
      Records of all requests, the JSON line, and the first message of each reason to
      fail.

    Raises:
      ValueError: a workload that cannot be, or a target that is not there.
    """
    try:
        facts = await target.facts()
    except RequestFailed as error:
        raise ValueError(f"the server does not answer: {error}") from None
    vocab_size, num_folded = plan.vocab_size or facts.vocab_size, 0
    items = plan.items(vocab_size or _VOCAB_SIZE)
    if vocab_size is not None:
        items, num_folded = serving_workloads.folded(items, vocab_size)
    items, num_clipped = serving_workloads.clipped(items, facts.max_context_len)
    arrivals_s = plan.arrivals(items)
    load = Load(target, ignore_eos=plan.ignore_eos, timeout_s=plan.request_timeout_s)
    await _warm_up(load, plan, vocab_size or _VOCAB_SIZE)
    seen: list[Mapping[str, float]] = []
    before = await target.counters()
    watching = asyncio.create_task(watch(target, plan.watch_s, seen))
    try:
        records = await load.run(items, arrivals_s, plan.max_concurrency)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    after, num_slots = await target.counters(), facts.num_slots or plan.num_slots
    server = server_facts(before, after, num_slots=num_slots, samples=seen)
    line = _plan_facts(plan, items, facts) | {
        "num_clipped": num_clipped, "num_folded": num_folded
    }  # fmt: skip
    line |= summary(records, plan.limits_ms)
    if line["request_rate"] == "inf":
        line["max_late_ms"] = None  # all were due at once
    return records, line | server, load.messages


async def _warm_up(load: Load, plan: Plan, vocab_size: int) -> None:
    """Requests of other ids than the workload's, one after the other.

    Raises:
      ValueError: one failed: so would all.
    """
    items = serving_workloads.synthetic(
        _WARMUP,
        plan.num_warmups,
        Shape(),
        vocab_size=vocab_size,
        seed=plan.workload_seed + 2**31,
    )
    records = await load.run(items, [0.0] * len(items), 1)
    if not all(record.is_ok for record in records):
        (reason, message), *_ = load.messages.items()
        raise ValueError(f"a warm-up request failed: {reason}: {message}")


def _plan_facts(plan: Plan, items: Sequence[Item], facts: Facts) -> dict[str, Any]:
    """What was asked for; a rate is "inf" or "replayed" where it is no number."""
    rate: float | str | None = plan.request_rate
    if plan.is_replayed(items):
        rate = "replayed"
    elif rate is None or math.isinf(rate):
        rate = "inf"  # JSON has no infinity
    return {
        "workload": plan.trace or plan.workload,
        "num_requests": len(items),
        "workload_seed": plan.workload_seed,
        "model": facts.model,
        "max_context_len": facts.max_context_len,
        "max_concurrency": plan.max_concurrency,
        "request_rate": rate,
        "burstiness": plan.burstiness if isinstance(rate, float) else None,
    }
