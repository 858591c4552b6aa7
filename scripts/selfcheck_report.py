"""What the parts of the self-check report, and how their reports add up. No jax.

A worker process writes records between the lines for people, the process that started
it collects them: what is known outlives a worker that crashes or hangs.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Begins a line that is a record.
MARK = "\x1e"
OK, FAILED, ERROR = "ok", "failed", "error"
OUT_OF_TIME = "not run: out of time"

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofs:
    """What the card was measured to do; None where it was not.

    Attributes:
      copy_bytes_per_s: read and written by a copy of a large array.
      matmul_flops_per_s: of a large square product in bfloat16.
    """

    copy_bytes_per_s: float | None = None
    matmul_flops_per_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call: of the best repeat, and of the median one."""

    best_s: float
    median_s: float

    @classmethod
    def of(cls, repeats_s: Sequence[float], calls: int) -> "Timing":
        """From the seconds of repeats of so many calls each."""
        return cls(
            best_s=min(repeats_s) / calls,
            median_s=statistics.median(repeats_s) / calls,
        )


class Part:
    """What one part found so far; every line is out as soon as it is known.

    Args:
      name: of the part.
      emit: takes each record.
      is_smoke: there is no GPU: measures are dropped, they would say nothing.
    """

    def __init__(
        self, name: str, emit: Callable[[Record], None], *, is_smoke: bool = False
    ) -> None:
        self.name, self.is_smoke = name, is_smoke
        self.num_failed = 0
        self._emit = emit

    def say(self, text: str) -> None:
        """A line for people."""
        print(f"[{self.name}] {text}", flush=True)

    def check(self, name: str, is_met: bool, **facts: Any) -> None:
        """Something that must hold, with the numbers that tell by how much it does."""
        is_met = bool(is_met)
        self.num_failed += not is_met
        shown = ", ".join(f"{key} {_short(value)}" for key, value in facts.items())
        self.say(f"{'ok  ' if is_met else 'FAIL'} {name}{': ' * bool(shown)}{shown}")
        self._record("check", {"name": name, "ok": is_met} | facts)

    def measure(
        self,
        name: str,
        value: float | None,
        unit: str,
        *,
        share: float | None = None,
        **facts: Any,
    ) -> None:
        """A measured number.

        Args:
          name: of what.
          value: in `unit`; None where it cannot be had.
          unit: "s", "B/s", "FLOP/s", "s/s" for ratios.
          share: of the roof, or of the floor, that it is compared with.
          **facts: others, such as the median beside the best.
        """
        if self.is_smoke:
            value, share, facts = None, None, dict.fromkeys(facts)
        row = {"name": name, "value": value, "unit": unit, "share": share} | facts
        self.say(measure_line(row))
        self._record("measure", row)

    def facts(self, **values: Any) -> None:
        """Anything else worth keeping, without a line."""
        self._record("facts", values)

    def end(self, status: str, seconds: float, error: str | None = None) -> None:
        """The last record."""
        self._record("end", {"status": status, "seconds": seconds, "error": error})

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        self._emit({"part": self.name, "kind": kind} | plain(values))


def measure_line(row: Mapping[str, Any]) -> str:
    """A measure for people: name, value, share, then the rest."""
    known = ("name", "value", "unit", "share", "part", "kind")
    share = "" if row["share"] is None else f"  {row['share']:6.1%}"
    rest = {k: v for k, v in row.items() if k not in known and v is not None}
    shown = ", ".join(f"{key} {_short(value)}" for key, value in rest.items())
    value = with_unit(row["value"], row["unit"])
    return f"{row['name']:<44}{value:>14}{share}{'  ' * bool(shown)}{shown}"


def with_unit(value: float | None, unit: str) -> str:
    """1.2e-5, "s" becomes "12.0 us"; None becomes "-"."""
    if value is None:
        return "-"
    if unit == "s/s":
        return f"{value:.3f}"
    if unit == "s":
        for size, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value * 1e6:.3g} us"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def share(part: float | None, whole: float | None) -> float | None:
    """part / whole; None where either is not known, or the whole is nothing."""
    if part is None or not whole:
        return None
    return part / whole


def read_record(line: str) -> Record | None:
    """The record of a worker's line; None for a line that is meant for people."""
    return json.loads(line[1:]) if line.startswith(MARK) else None


def write_record(record: Record) -> None:
    """Onto the standard output, for the process that started this one."""
    print(f"{MARK}{json.dumps(record)}", flush=True)


def collect(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Records as one dict per part: status, seconds, error, checks, measures, facts.

    A part without a last record has the status "error": its process ended in it.
    """
    parts: dict[str, dict[str, Any]] = {}
    for record in records:
        part = parts.setdefault(
            record["part"],
            {
                "status": ERROR,
                "seconds": None,
                "error": "its process ended",
                "checks": [],
                "measures": [],
                "facts": {},
            },
        )
        rest = {k: v for k, v in record.items() if k not in ("part", "kind")}
        if record["kind"] in ("check", "measure"):
            part[f"{record['kind']}s"].append(rest)
        elif record["kind"] == "facts":
            part["facts"] |= rest
        elif record["kind"] == "end":
            part |= rest
    return parts


def table(parts: Mapping[str, Mapping[str, Any]], *, title: str) -> str:
    """All parts for people: status, what failed, what was measured."""
    lines = ["", title, "=" * len(title)]
    for name, part in parts.items():
        checks = part["checks"]
        failed = [check["name"] for check in checks if not check["ok"]]
        seconds = "-" if part["seconds"] is None else f"{part['seconds']:.1f} s"
        lines.append(
            f"{name:<12} {part['status']:<22}{seconds:>9}"
            f"  {len(checks) - len(failed)} of {len(checks)} checks hold"
        )
        lines += [f"    FAIL {check}" for check in failed]
        if part["error"]:
            lines += [f"    {line}" for line in part["error"].splitlines()[-6:]]
        lines += [f"    {measure_line(row)}" for row in part["measures"]]
    return "\n".join(lines)


def exit_code(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """0 only where all of every part was run and holds."""
    return 0 if all(part["status"] == OK for part in parts.values()) else 1


def plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
