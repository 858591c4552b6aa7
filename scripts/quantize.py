"""Quantizes a model and keeps it as a Headrace store, with what that cost beside it.

    python -m headrace.scripts.quantize --scheme=gptq-g64 --store=FOLDER

Schemes are those of quality_report.py but for KV pages: rounding (int8, w8a8, fp8,
rtn-g64, ...) reads each weight once; awq-gN, gptq-gN and w8a8-smooth are calibrated on
--calibration_text, layer by layer, so that beside the model one layer is in memory.
The store loads as it is: `LLM("FOLDER")`. Unless --noreport it is then compared with
the model as it came, both in memory, and the result is kept in the store and shown
whenever it is loaded.
"""

import dataclasses
import json
import pathlib
import sys

from absl import app, flags

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.orbax_store import save_store
from headrace.scripts import engine_flags, quality_texts
from headrace.scripts.quality_compare import (
    Judge,
    Wanted,
    quantized,
    scheme_of,
    table,
)
from headrace.scripts.quality_report import report_on

FLAGS = flags.FLAGS

flags.DEFINE_string("scheme", None, "How to quantize.")
flags.DEFINE_string("store", None, "Folder to make.")
flags.DEFINE_bool("report", True, "Measure what it costs.")


def run() -> int:
    """Quantizes; returns the exit code.

    Raises:
      ValueError: flags that make no sense, or a scheme that does not fit the model.
    """
    if FLAGS.scheme is None or FLAGS.store is None:
        raise ValueError("--scheme and --store are needed")
    wanted, path = scheme_of(FLAGS.scheme), pathlib.Path(FLAGS.store).expanduser()
    if wanted.rounding is None:
        raise ValueError(
            f"scheme {FLAGS.scheme!r} is of KV pages; it is the engine's kv_dtype"
        )
    if wanted.splits_outliers:
        raise ValueError(f"scheme {FLAGS.scheme!r} is for quality_report.py alone")
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name or remove it")
    save_store(path, _made(wanted))
    print(f"{path}: {FLAGS.scheme}")
    if FLAGS.report:
        base = quality_texts.base_checkpoint()
        judge = Judge(base, quality_texts.report_windows(base))
        line = report_on(judge, path, base)
        print(table([line]))
        print(json.dumps(line))
    return 0


def _made(wanted: Wanted) -> Checkpoint:
    if wanted.method is None and (FLAGS.model or FLAGS.config is None):
        name = FLAGS.model or engine_flags.DEFAULT_MODEL
        rounding = wanted.rounding
        return load_checkpoint(name, rounding=rounding, cache_dir=FLAGS.cache_dir)
    base = quality_texts.base_checkpoint()
    made = quantized(
        base, wanted, lambda: quality_texts.calibration_windows(base), donate=True
    )
    if made.calibration is None:
        return made
    facts = {**made.calibration, "text": quality_texts.calibration_name()}
    return dataclasses.replace(made, calibration=facts)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) > 1:
        print(f"error: only flags are taken, got {argv[1:]}", file=sys.stderr)
        return 1
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
