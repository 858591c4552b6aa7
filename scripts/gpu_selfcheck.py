"""Checks and measures the engine on the GPU at hand, in one run of some minutes.

    python -m headrace.scripts.gpu_selfcheck --out=selfcheck.json

Synthetic weights, no downloads. Needs jax, flax, absl-py, einops and numpy; the rest of
the package's requirements may be missing. Prints lines as it finds things, then a
table, then one JSON line. Without a GPU it is a smoke test: tiny shapes, kernels in the
interpreter, no times. Exits with 1 where anything failed or was not run.

The parts run in a process of their own. One that fails so hard that the device answers
no more, or that hangs, costs its own part: the others go on in a new process.
"""

import dataclasses
import datetime
import json
import pathlib
import sys
import time

from absl import flags

from headrace.scripts import selfcheck_report
from headrace.scripts.selfcheck_report import Record, Roofs
from headrace.scripts.selfcheck_supervisor import PARTS, Supervisor

# Own flags: absl's global ones are shared by all scripts that a process imports.
FLAGS = flags.FlagValues()
flags.DEFINE_list(
    "parts", list(PARTS), f"Which of {', '.join(PARTS)}.", flag_values=FLAGS
)
flags.DEFINE_float(
    "budget_s", 420.0, "No part begins after so many seconds.", flag_values=FLAGS
)
flags.DEFINE_integer("seed", 0, "Of everything random.", flag_values=FLAGS)
flags.DEFINE_string(
    "out", None, "File for the JSON, too, with indents.", flag_values=FLAGS
)
flags.DEFINE_boolean(
    "compare_options",
    True,
    "Time a decode step with other compiler options (on a GPU).",
    flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        words = FLAGS(argv)[1:]
        unknown = [name for name in FLAGS.parts if name not in PARTS]
        if words or unknown:
            raise flags.Error(f"no such part or argument: {words + unknown}")
    except flags.Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    begin_s = time.time()
    names = [name for name in PARTS if name in FLAGS.parts]
    print(
        f"self-check of {len(names)} parts, seed {FLAGS.seed}, budget "
        f"{FLAGS.budget_s:.0f} s",
        flush=True,
    )
    supervisor = Supervisor(_worker_command, begin_s + FLAGS.budget_s)
    supervisor.run(names)
    return report(supervisor.records, names, time.time() - begin_s)


def report(records: list[Record], names: list[str], seconds: float) -> int:
    """Prints the table and the JSON line; returns the exit code."""
    found = selfcheck_report.collect(records)
    parts = {name: found[name] for name in names}
    device = found.get("start", {}).get("facts", {})
    title = f"{device.get('card')}, jax {device.get('jax')}, {seconds:.0f} s"
    is_smoke = device.get("platform", "gpu") != "gpu"
    if is_smoke:
        title = f"CPU, smoke test: times say nothing ({title})"
    print(selfcheck_report.table(parts, title=title))
    code = selfcheck_report.exit_code(parts)
    facts = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": FLAGS.seed,
        "is_smoke": is_smoke,
        **{"card": None, "jax": None} | device,
        "seconds": round(seconds, 1),
        "budget_s": FLAGS.budget_s,
        "exit_code": code,
        "parts": parts,
    }
    if FLAGS.out is not None:
        pathlib.Path(FLAGS.out).write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts), flush=True)
    return code


def _worker_command(
    names: list[str], deadline_s: float, records: list[Record]
) -> list[str]:
    """A worker, told what the ones before it measured."""
    roofs = [record["roofs"] for record in records if "roofs" in record]
    told = {
        "names": names,
        "deadline_s": deadline_s,
        "roofs": roofs[-1] if roofs else dataclasses.asdict(Roofs()),
        "seed": FLAGS.seed,
        "compares_options": FLAGS.compare_options,
    }
    module = "headrace.scripts.selfcheck_worker"
    return [sys.executable, "-u", "-m", module, json.dumps(told)]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
