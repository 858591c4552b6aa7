r"""What tokens cost, how many GPUs a demand needs, and a bill per tenant.

    python -m headrace.scripts.cost --bench=runs.jsonl --price_per_hour=3.29 \
        --demand_requests_per_s=40
    python -m headrace.scripts.cost --ledger=metrics.txt --price_per_hour=3.29

--bench is what bench_serving.py (or vllm bench serve) wrote; prices and GPUs follow
from its speed, so take a run that was saturated. --ledger is `LLM.stats()` as JSON, or
a saved /metrics page. Prints tables with their formulas, then one JSON line.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from absl import app, flags

from headrace.scripts import cost_ledger, engine_flags
from headrace.scripts.cost_model import Prices, capacity, checked, token_prices

FLAGS = flags.FLAGS

flags.DEFINE_string("bench", None, "JSON lines of bench_serving.py.")
flags.DEFINE_float("price_per_hour", None, "Of one GPU, in any currency.")
flags.DEFINE_integer("engine_gpus", 1, "GPUs that the measured engine runs on.")
flags.DEFINE_float(
    "input_weight", 1.0, "Cost of an input token over an output token's."
)
flags.DEFINE_float(
    "prefill_share", None, "Part of the device's time that prefill takes, if measured."
)
flags.DEFINE_float("demand_requests_per_s", None, "Requests per second to be served.")
flags.DEFINE_float("tokens_per_request", None, "In and out; default: as measured.")
flags.DEFINE_float("target_utilization", 0.7, "Part of the measured speed to plan for.")
flags.DEFINE_float("redundancy", 1.0, "Times that are kept in reserve: 1 is none.")
flags.DEFINE_string("ledger", None, "Usage per tenant: stats as JSON, or /metrics.")
flags.DEFINE_string("ledger_before", None, "The same at the period's beginning.")
flags.DEFINE_float(
    "period_hours", None, "Bill all of these hours, idle ones too, by device time."
)

_RUN_FIELDS = ("completed", "duration", "total_input_tokens", "total_output_tokens")


def read_runs(path: str) -> list[dict[str, Any]]:
    """The runs of a file of JSON lines.

    Raises:
      ValueError: a line that is no run, by its number, or no line at all.
    """
    runs = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                run = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: no JSON: {error}") from None
            for name in _RUN_FIELDS:
                value = run.get(name) if isinstance(run, dict) else None
                if type(value) not in (int, float) or not 0 < value < math.inf:
                    raise ValueError(
                        f"{path}, line {number}: {name} must be a number above 0, got "
                        f"{value!r}"
                    )
            runs.append(run)
    if not runs:
        raise ValueError(f"{path} holds no run")
    return runs


def costs_of(run: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    """The JSON fields of one run: prices of tokens and, where asked, GPUs needed."""
    tokens_in, tokens_out = run["total_input_tokens"], run["total_output_tokens"]
    names = ("workload", "model", "request_rate")
    found: dict[str, Any] = {name: run.get(name) for name in names}
    found |= token_prices(tokens_in, tokens_out, run["duration"], prices)
    if FLAGS.demand_requests_per_s is not None:
        measured = (tokens_in + tokens_out) / run["completed"]
        found |= capacity(
            FLAGS.demand_requests_per_s,
            FLAGS.tokens_per_request or measured,
            (tokens_in + tokens_out) / run["duration"],
            num_gpus=FLAGS.engine_gpus,
            target_utilization=FLAGS.target_utilization,
            redundancy=FLAGS.redundancy,
        )
        found["cost_per_hour"] = found["gpus_needed"] * prices.per_gpu_hour
    return found


_LABELS = {
    "total_tokens_per_s": "Tokens in and out, per second",
    "cost_per_m_tokens": "Per million tokens, in and out alike",
    "cost_per_m_input_tokens": "Per million input tokens",
    "cost_per_m_output_tokens": "Per million output tokens",
    "cost_per_m_output_tokens_alone": "Per million output, input for free",
    "gpus_exact": "GPUs by the formula",
    "gpus_needed": "GPUs needed, whole engines",
    "cost_per_hour": "Their cost per hour",
}
_FORMULAS = """\
per million tokens = price x GPUs / (tokens/s x 3600) x 1,000,000
GPUs = requests/s x tokens per request
       / (tokens/s of a GPU x target utilization) x redundancy"""


def run_table(found: Mapping[str, Any]) -> str:
    """One run's costs for people."""
    rows = [f"{found['workload']}, {found['model']}", f"  split: {found['split']}"]
    rows += [
        f"  {label + ':':<40}{_number(found[name]):>14}"
        for name, label in _LABELS.items()
        if name in found
    ]
    if isinstance(found["request_rate"], int | float):
        rows.append(
            f"  it was sent {found['request_rate']:g} requests/s: unless that was more "
            "than it could serve, it is faster, and cheaper, than this says"
        )
    return "\n".join(rows)


def bill_table(bill: Mapping[str, Mapping[str, Any]], total: Mapping[str, Any]) -> str:
    """All tenants for people, the sum last."""
    names = (
        "requests", "prompt_tokens", "cached_prompt_tokens", "generation_tokens",
        "device_seconds", "cost",
    )  # fmt: skip
    head = f"{'tenant':<24}" + "".join(f"{name:>22}" for name in names)
    rows = [
        f"{tenant[:23]:<24}" + "".join(f"{_number(row[name]):>22}" for name in names)
        for tenant, row in [*bill.items(), ("(total)", total)]
    ]
    return "\n".join([head, *rows])


def _number(value: float | None) -> str:
    if value is None:
        return "not known"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"


def run() -> int:
    """Prints what the flags ask for; returns the exit code.

    Raises:
      ValueError, OSError: a value out of its range, or a file that is none of ours.
    """
    if FLAGS.bench is None and FLAGS.ledger is None:
        raise ValueError("bench or ledger must be given")
    if FLAGS.ledger_before is not None and FLAGS.ledger is None:
        raise ValueError("ledger_before needs ledger")
    if FLAGS.price_per_hour is None:
        raise ValueError("price_per_hour must be given")
    prices = Prices(
        per_gpu_hour=FLAGS.price_per_hour,
        num_gpus=FLAGS.engine_gpus,
        input_weight=FLAGS.input_weight,
        prefill_share=FLAGS.prefill_share,
    )
    line: dict[str, Any] = {
        "price_per_hour": prices.per_gpu_hour, "engine_gpus": prices.num_gpus
    }  # fmt: skip
    if FLAGS.bench is not None:
        line["runs"] = [costs_of(run, prices) for run in read_runs(FLAGS.bench)]
        print(_FORMULAS)
        for found in line["runs"]:
            print(run_table(found))
    if FLAGS.ledger is not None:
        line |= _bill(prices)
    print(json.dumps(line))
    return 0


def _bill(prices: Prices) -> dict[str, Any]:
    usage = cost_ledger.read(FLAGS.ledger)
    if FLAGS.ledger_before is not None:
        usage = cost_ledger.since(cost_ledger.read(FLAGS.ledger_before), usage)
    hours = FLAGS.period_hours
    if hours is not None:
        checked("period_hours", hours, above=0)
    bill, total = cost_ledger.bill(usage, prices.per_gpu_hour, prices.num_gpus, hours)
    rule = "tenant = price x GPUs x device seconds / 3600; idle time is nobody's"
    if hours is not None:
        rule = "tenant = price x GPUs x period hours x its share of device seconds"
    print(rule)
    print(bill_table(bill, total))
    return {"bill": bill, "bill_total": total, "bill_rule": rule, "period_hours": hours}


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused."""
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, got {argv[1:]}")
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
