"""What a server counts of itself, before and after a run: Prometheus or engine.stats.

A state is a flat {name: number} without prefix, labels added up: counters as they are,
histograms as NAME_sum and NAME_count. What a server does not have is None here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

State = Mapping[str, float]

# With the colon: counters of tenants end alike, and their prefix is not it.
_MARK = ":generation_tokens_total"
_FIRSTS = "time_to_first_token_seconds_count"  # a first token comes from a prefill


def of_page(text: str) -> dict[str, float]:
    """A /metrics page, whatever its prefix: that which `generation_tokens` has.

    Returns:
      Empty where the page has no such counter.

    Raises:
      ValueError: the text is no such page.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    marked = [name for name in samples if name.endswith(_MARK)]
    if not marked:
        return {}
    prefix = marked[0].removesuffix(_MARK) + ":"
    return {
        name.removeprefix(prefix).removesuffix("_total"): value
        for name, value in samples.items()
        if name.startswith(prefix) and not name.endswith(("_bucket", "_created"))
    }


def of_stats(stats: Mapping[str, Any]) -> dict[str, float]:
    """What `LLM.stats` gives."""
    state: dict[str, float] = {
        name: float(value)
        for name, value in {**stats["counters"], **stats["gauges"]}.items()
        if isinstance(value, int | float)
    }
    for name, histogram in stats["histograms"].items():
        state[f"{name}_sum"] = float(histogram["sum"])
        state[f"{name}_count"] = float(histogram["count"])
    return state


def server_facts(
    before: State | None,
    after: State | None,
    *,
    num_slots: int | None = None,
    samples: Sequence[State] = (),
) -> dict[str, float | None]:
    """What the server did between two states.

    Args:
      before, after: None where it shows none.
      num_slots: requests that it decodes together, where that is known.
      samples: states during the run, for what only the moment shows.

    Returns:
      prefix_hit_percent: of prompt tokens looked up, those found in the cache.
      batch_efficiency: mean of decode rows over the rows of the compiled step.
      slot_efficiency: tokens that decoding gave over slots times decode steps.
      preemptions: requests that gave way.
      mean_kv_usage_percent, peak_kv_usage_percent: of the pages, over the samples.
      Each is None where it is not known.
    """

    def change(name: str) -> float | None:
        if name not in (before or {}) or name not in (after or {}):
            return None
        return after[name] - before[name]  # type: ignore[index]

    steps = change("batch_efficiency_count")
    tokens, firsts = change("generation_tokens"), change(_FIRSTS)
    decoded = None if tokens is None or firsts is None else tokens - firsts
    row_steps = None if num_slots is None or steps is None else num_slots * steps
    usage = [s["kv_cache_usage_perc"] for s in samples if "kv_cache_usage_perc" in s]
    hits, asked = change("prefix_cache_hits"), change("prefix_cache_queries")
    mean_usage = sum(usage) / len(usage) if usage else None
    return {
        "prefix_hit_percent": _ratio(hits, asked, 100),
        "batch_efficiency": _ratio(change("batch_efficiency_sum"), steps),
        "slot_efficiency": _ratio(decoded, row_steps),
        "preemptions": change("num_preemptions"),
        "mean_kv_usage_percent": _ratio(mean_usage, 1, 100),
        "peak_kv_usage_percent": _ratio(max(usage, default=None), 1, 100),
    }


def _ratio(part: float | None, whole: float | None, times: float = 1) -> float | None:
    return round(times * part / whole, 4) if part is not None and whole else None
