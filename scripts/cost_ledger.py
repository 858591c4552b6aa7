"""Usage per tenant, read from a file, and what it comes to. No engine.

The file is `LLM.stats()` (or its "tenants" alone) as JSON, or a saved /metrics page
with `PREFIX:tenant_device_seconds_total{tenant="..."}` and its companions.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

FIELDS = (
    "requests", "prompt_tokens", "cached_prompt_tokens", "generation_tokens",
    "device_seconds",
)  # fmt: skip
# Pages of old versions may lack the others, which no bill depends on.
REQUIRED = ("prompt_tokens", "generation_tokens", "device_seconds")

Usage = dict[str, dict[str, float | int | None]]
"""{tenant: {field: amount}}; None: not told."""


def read(path: str) -> Usage:
    """Reads a ledger.

    Raises:
      ValueError: neither form, or an amount that is missing or below 0.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8")
    is_json = text.lstrip().startswith("{")
    try:
        found = _of_json(text) if is_json else _of_page(text)
        if not found:
            raise ValueError("no tenant's device_seconds are in it")
        return {tenant: _checked(tenant, row) for tenant, row in found.items()}
    except ValueError as error:
        raise ValueError(f"ledger {path}: {error}") from None


def _of_json(text: str) -> dict[str, Any]:
    stats = json.loads(text)
    return stats["tenants"] if "tenants" in stats else stats


def _of_page(text: str) -> dict[str, Any]:
    """Samples by tenant; those of several engines or models add up."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2].removesuffix("_total")
            field, tenant = name.removeprefix("tenant_"), sample.labels.get("tenant")
            if tenant is None or field == name or field not in FIELDS:
                continue
            row = found.setdefault(tenant, {})
            row[field] = row.get(field, 0) + sample.value
    return found


def _checked(tenant: str, row: Any) -> dict[str, float | int | None]:
    if not isinstance(row, Mapping):
        raise ValueError(f"tenant {tenant!r} must have fields, got {row!r:.80}")
    usage: dict[str, float | int | None] = {}
    for name in FIELDS:
        value = row.get(name)
        if value is None and name not in REQUIRED:
            usage[name] = None
            continue
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(
                f"{name} of tenant {tenant!r} must be a number, 0 or more, got "
                f"{value!r}"
            )
        usage[name] = float(value) if name == "device_seconds" else int(value)
    return usage


def since(before: Usage, after: Usage) -> Usage:
    """What was used between two readings of one engine.

    Raises:
      ValueError: an amount fell: the engine was started anew in between.
    """
    for tenant in before.keys() - after.keys():
        raise ValueError(f"ledger: tenant {tenant!r} is in the earlier reading alone")
    used: Usage = {}
    for tenant, row in after.items():
        used[tenant] = {}
        for name, value in row.items():
            old = before.get(tenant, {}).get(name, 0)
            used[tenant][name] = None if value is None or old is None else value - old
            if value is not None and old is not None and value < old:
                raise ValueError(
                    f"ledger: {name} of tenant {tenant!r} fell from {old} to {value}: "
                    "the engine was started anew, so bill its two lives apart"
                )
    return used


def bill(
    usage: Usage, per_gpu_hour: float, num_gpus: int, period_hours: float | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Usage and cost of each tenant, the dearest first, and of all together.

    Args:
      usage: of one engine.
      per_gpu_hour: price of a GPU.
      num_gpus: of the engine.
      period_hours: None bills device seconds alone; else all of these hours, split by
        device seconds.

    Raises:
      ValueError: a period in which no tenant used the device, or which was shorter
        than the use.
    """
    total_s = math.fsum(_seconds(row) for row in usage.values())
    rate = per_gpu_hour * num_gpus / 3600
    if period_hours is not None:
        if not total_s > 0 or total_s > period_hours * 3600:
            raise ValueError(
                f"period_hours must hold the {total_s:g} device seconds used, and "
                f"these be above 0, got {period_hours}"
            )
        rate *= period_hours * 3600 / total_s
    rows: dict[str, dict[str, Any]] = {
        tenant: {**row, "cost": rate * _seconds(row)}
        for tenant, row in sorted(usage.items(), key=lambda one: -_seconds(one[1]))
    }
    names = (*FIELDS, "cost")
    return rows, {name: _sum(row[name] for row in rows.values()) for name in names}


def _seconds(row: Mapping[str, Any]) -> float:
    return row["device_seconds"]


def _sum(values: Any) -> Any:
    known = list(values)
    if None in known:
        return None
    return math.fsum(known) if float in map(type, known) else sum(known)
