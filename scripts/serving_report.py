"""A run's table for people. Pure: the fields of the JSON line in, text out."""

from collections.abc import Mapping
from typing import Any

WIDTH = 58
_COUNTS = {
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Latest send behind its time (ms)": "max_late_ms",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Request goodput (req/s)": "request_goodput",
    "Output token throughput (tok/s)": "output_throughput",
    "Peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "Peak concurrent requests": "max_concurrent_requests",
    "Total Token throughput (tok/s)": "total_token_throughput",
    "Tokens per gap": "tokens_per_gap",
}
_LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_SERVER = {
    "Slot efficiency": "slot_efficiency",
    "Rows over compiled rows": "batch_efficiency",
    "KV cache in use, mean (%)": "mean_kv_usage_percent",
    "KV cache in use, peak (%)": "peak_kv_usage_percent",
    "Prefix cache hits (% of prompt tokens)": "prefix_hit_percent",
    "Preemptions": "preemptions",
}


def table(line: Mapping[str, Any]) -> str:
    """The main fields of a run's JSON line."""
    rows = [_title(f"Serving Benchmark Result, {line['workload']}", "=")]
    rows += [_row(label, line[name]) for label, name in _COUNTS.items()]
    for name, title in _LATENCIES.items():
        rows.append(_title(title, "-"))
        for key in ("mean", "median", "std", "p50", "p95", "p99"):
            label = key.capitalize() if key[0] != "p" else key.upper()
            value = line[f"{key}_{name}_ms"]
            rows.append(_row(f"{label} {name.upper()} (ms)", value))
    rows.append(_title("Server", "-"))
    rows += [_row(label, line[name], "not known") for label, name in _SERVER.items()]
    return "\n".join([*rows, "=" * WIDTH])


def remarks(line: Mapping[str, Any], messages: Mapping[str, str]) -> list[str]:
    """What the numbers do not say of themselves, a line each.

    Args:
      line: the JSON line.
      messages: the first of each reason to fail.
    """
    found = []
    if line["num_clipped"]:
        found.append(
            f"{line['num_clipped']} of {line['num_requests']} requests were shortened "
            f"to a context of {line['max_context_len']} tokens"
        )
    if line["num_folded"]:
        found.append(f"{line['num_folded']} requests had ids outside the vocabulary")
    if line["max_context_len"] is None:
        found.append("the context is not known: requests were not shortened to it")
    if line["prefix_hit_percent"] is None:
        found.append("prefix hits are not known; a rerun may find its prompts cached")
    elif line["prefix_hit_percent"]:
        found.append(
            f"{line['prefix_hit_percent']:.1f} % of prompt tokens were cached, as they "
            "are in a rerun: another --workload_seed has other prompts"
        )
    if line["goodput_limits_ms"] == {}:
        found.append("no goodput without --goodput=ttft:MS,tpot:MS,e2el:MS")
    for reason, count in line["failed_by_reason"].items():
        found.append(f"{count} failed: {reason}: {messages.get(reason, '')}")
    return found


def _title(text: str, mark: str) -> str:
    return f" {text} ".center(WIDTH, mark)


def _row(label: str, value: Any, unknown: str = "-") -> str:
    if value is None:
        text = unknown
    else:
        text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<42}{text:>16}"
