"""What quantization costs in quality: each scheme against the model as it came.

    python -m headrace.scripts.quality_report --schemes=int8,w8a8,fp8,kv-int8
    python -m headrace.scripts.quality_report --model=FOLDER --text=my.txt
    python -m headrace.scripts.quality_report --model=FOLDER --checkpoint=ITS-AWQ

Both models predict every next token of the same text, in windows of --window_tokens.
Prints a table, a line of JSON per scheme, and with --plot a picture. Schemes: names of
configs/quantization.py, rtn-gN for int4-gN, awq-gN and gptq-gN for the same with
calibration, w8a8-smooth, llm-int8 (w8a8 with large inputs left in float32, which no
engine runs), and kv-int8 and kv-fp8 for KV pages, which also search long contexts for
a number. --checkpoint is a quantized one of the same model: its line is
kept beside it and shown whenever it is loaded. The text is the prompts of the workload
`long` unless --text names one; calibration is on those of `offline`.
Exits with 1 where a scheme cannot be made.
"""

import json
import pathlib
import sys
from typing import Any

from absl import app, flags

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quality import save_quality
from headrace.scripts import engine_flags, quality_texts
from headrace.scripts.quality_compare import Judge, quantized, scheme_of, table

FLAGS = flags.FLAGS

flags.DEFINE_list(
    "schemes",
    None,
    "What to compare with the model as it came; default: int8, w8a8, fp8, fp8-w8a8, "
    "rtn-g64, kv-int8 and kv-fp8, or nothing beside --checkpoint.",
)
flags.DEFINE_string("checkpoint", None, "File or folder of a quantized checkpoint.")
flags.DEFINE_string("plot", None, "PNG file for a picture of the table.")

_SCHEMES = ("int8", "w8a8", "fp8", "fp8-w8a8", "rtn-g64", "kv-int8", "kv-fp8")


def plot(lines: list[dict[str, Any]], path: str) -> None:
    """Increase of perplexity, and bytes, of each scheme as bars.

    Raises:
      ValueError: the extra `bench` is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--plot needs the extra `bench`: {error}") from None
    figure = Figure(figsize=(8, 4), layout="constrained")
    names = [line["scheme"] for line in lines]
    for axes, key, label, scale in zip(
        figure.subplots(1, 2),
        ("perplexity_increase", "bytes"),
        ("perplexity, increase in %", "weights, MB"),
        (100, 1e-6),
        strict=True,
    ):
        axes.barh(names, [line[key] * scale for line in lines])
        axes.set_xlabel(label)
        axes.invert_yaxis()
    figure.savefig(path)


def run() -> int:
    """Compares the schemes of the flags; returns the exit code.

    Raises:
      ValueError: flags that make no sense.
    """
    names = FLAGS.schemes
    if names is None:
        names = [] if FLAGS.checkpoint else _SCHEMES
    wanted = {name: scheme_of(name) for name in names}
    base = quality_texts.base_checkpoint()
    judge = Judge(
        base, quality_texts.report_windows(base), quality_texts.report_needles(base)
    )
    lines = []
    for name, scheme in wanted.items():
        other = quantized(base, scheme, lambda: quality_texts.calibration_windows(base))
        storage = quality_texts.kv_storage(base, scheme.kv_dtype)
        lines.append(judge.line(name, other, storage, scheme.splits_outliers))
    if FLAGS.checkpoint:
        path = pathlib.Path(FLAGS.checkpoint).expanduser()
        lines.append(report_on(judge, path, base))
    print(table(lines))
    for line in lines:
        print(json.dumps(line))
    if FLAGS.plot:
        plot(lines, FLAGS.plot)
    return 0


def report_on(judge: Judge, path: pathlib.Path, base: Checkpoint) -> dict[str, Any]:
    """The line of a quantized checkpoint, which is kept beside it.

    Raises:
      ValueError: it is not quantized, or of another model.
    """
    other = load_checkpoint(path, keep_packed=True, cache_dir=FLAGS.cache_dir)
    if other.quantization is None:
        raise ValueError(f"{path} is not quantized")
    if other.config != base.config:
        raise ValueError(f"{path} has other shapes than the model that it should be of")
    line = judge.line(_name_of(other), other)
    save_quality(path, other, line)
    return line


def _name_of(checkpoint: Checkpoint) -> str:
    """As in --schemes, where a calibration tells its method."""
    assert checkpoint.quantization is not None
    method = (checkpoint.calibration or {}).get("method")
    if method == "smooth":
        return f"{checkpoint.quantization}-smooth"
    return checkpoint.quantization.replace("int4", method or "int4")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) > 1:
        print(f"error: only flags are taken, got {argv[1:]}", file=sys.stderr)
        return 1
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
