"""The engine's metrics as Prometheus reads them, by vLLM's names. No jax.

With the prefix "vllm" dashboards made for vLLM show this engine.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from headrace.engine.usage import TenantUsage

if TYPE_CHECKING:
    from headrace.engine.async_llm import AsyncLLM

Metrics = Callable[[], Awaitable[tuple[bytes, str]]]
"""Gives the text of /metrics, and its content type."""

_LABEL_NAMES = ("model_name", "engine")


class Snapshot:
    """One state of an engine, for a registry to collect.

    Args:
      stats: of `LLM.stats`.
      num_slots: requests that decode together.
      model_name: the label that all samples carry.
      prefix: of every name.
    """

    def __init__(
        self, stats: Mapping[str, Any], num_slots: int, model_name: str, prefix: str
    ) -> None:
        self._stats, self._num_slots = stats, num_slots
        self._labels, self._prefix = (model_name, "0"), prefix

    def collect(self) -> Iterator[Metric]:
        """All metrics, each with the labels model_name and engine."""
        for name, value in self._stats["counters"].items():
            if name == "request_success":
                yield self._finished(value)
            else:
                counter = CounterMetricFamily(*self._named(name), labels=_LABEL_NAMES)
                counter.add_metric(self._labels, value)
                yield counter
        yield from self._drafts(self._stats.get("speculation") or {})
        gauges = self._stats["gauges"] | {"saturation": self._saturation()}
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(*self._named(name), labels=_LABEL_NAMES)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, found in self._stats["histograms"].items():
            histogram = HistogramMetricFamily(*self._named(name), labels=_LABEL_NAMES)
            buckets = list(found["buckets"].items())
            histogram.add_metric(self._labels, buckets, found["sum"])
            yield histogram
        yield from self._tenants()

    def _named(self, name: str) -> tuple[str, str]:
        return f"{self._prefix}:{name}", _HELP.get(name, name.replace("_", " "))

    def _drafts(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        """Counters of speculation; none without it."""
        if not stats:
            return
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            names = self._named("spec_decode_" + name)
            counter = CounterMetricFamily(*names, labels=_LABEL_NAMES)
            counter.add_metric(self._labels, stats[name])
            yield counter
        counter = CounterMetricFamily(
            *self._named("spec_decode_num_accepted_tokens_per_pos"),
            labels=(*_LABEL_NAMES, "position"),
        )
        for place, count in enumerate(stats["num_accepted_tokens_per_pos"]):
            counter.add_metric((*self._labels, str(place)), count)
        yield counter

    def _finished(self, counts: Mapping[str, int]) -> Metric:
        names = (*_LABEL_NAMES, "finished_reason")
        counter = CounterMetricFamily(*self._named("request_success"), labels=names)
        for reason, count in counts.items():
            counter.add_metric((*self._labels, reason), count)
        return counter

    def _tenants(self) -> Iterator[Metric]:
        """Counters by tenant: not vLLM's, and no more tenants than the ledger keeps."""
        names = (*_LABEL_NAMES, "tenant")
        for field in dataclasses.fields(TenantUsage):
            family = self._named(f"tenant_{field.name}")
            counter = CounterMetricFamily(*family, labels=names)
            for tenant, usage in self._stats["tenants"].items():
                counter.add_metric((*self._labels, tenant), usage[field.name])
            yield counter

    def _saturation(self) -> float:
        """Above 1 requests wait: more replicas would help.

        The larger of the requests, running and waiting, over the slots, and of the KV
        cache in use.
        """
        gauges = self._stats["gauges"]
        asked = gauges["num_requests_running"] + gauges["num_requests_waiting"]
        return max(asked / self._num_slots, gauges["kv_cache_usage_perc"])


_HELP = {
    "saturation": "Requests over slots, or KV cache in use; over 1 some wait",
    "unauthenticated_calls": "Calls that were refused for want of a known key",
    "kv_cache_usage_perc": "Part of the KV cache in use, 0 to 1",
}


async def exposition(
    engine: "AsyncLLM",
    *,
    model_name: str,
    prefix: str = "headrace",
    counters: Callable[[], Mapping[str, int]] = dict,
) -> tuple[bytes, str]:
    """What GET /metrics answers: text, and its content type.

    Args:
      engine: whose metrics they are.
      model_name: the label of all samples.
      prefix: "headrace", or "vllm" for dashboards that are there already.
      counters: gives those that are not the engine's.
    """
    num_slots = engine.llm.engine_config.num_slots
    assert num_slots is not None
    registry = CollectorRegistry(auto_describe=False)
    stats = await engine.stats()
    stats |= {"counters": stats["counters"] | dict(counters())}
    snapshot = Snapshot(stats, num_slots, model_name, prefix)
    registry.register(snapshot)  # type: ignore[arg-type]
    return generate_latest(registry), CONTENT_TYPE_LATEST
