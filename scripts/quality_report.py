"""What quantization costs in quality: each scheme against the model as it came.

    python -m headrace.scripts.quality_report --schemes=int8,w8a8,fp8,kv-int8
    python -m headrace.scripts.quality_report --model=FOLDER --text=my.txt

Both models predict every next token of the same text, in windows of --window_tokens.
Prints a table, a line of JSON per scheme, and with --plot a picture. Schemes: names of
configs/quantization.py, rtn-gN for int4-gN, awq-gN and gptq-gN for the same with
calibration, w8a8-smooth, and kv-int8 and kv-fp8 for KV pages. The text is the prompts
of the workload `long` unless --text names one; calibration is on those of `offline`.
Exits with 1 where a scheme cannot be made.
"""

import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from headrace.checkpoints.calibrate import Method, calibrated
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.configs.quantization import parse_scheme
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.tokenizer import HFTokenizer
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import pages_of, whole_prompt
from headrace.layers.models import build_model
from headrace.layers.quantized import is_quantized, tree_bytes
from headrace.scripts import engine_flags
from headrace.scripts.bench_throughput import fold_ids, load_workload
from headrace.scripts.quality_metrics import Agreement, relative_error, windows

FLAGS = flags.FLAGS

flags.DEFINE_list(
    "schemes",
    ["int8", "w8a8", "fp8", "fp8-w8a8", "rtn-g64", "kv-int8", "kv-fp8"],
    "What to compare with the model as it came.",
)
flags.DEFINE_string("text", None, "File of text; default: the workload `long`.")
flags.DEFINE_integer("num_tokens", 8192, "Predicted tokens, at most.", lower_bound=1)
flags.DEFINE_integer("window_tokens", 1024, "Of a window of text.", lower_bound=8)
flags.DEFINE_string("plot", None, "PNG file for a picture of the table.")

_KV = {"kv-int8": "int8", "kv-fp8": "float8_e4m3fn"}
_PAGE = 64
# Windows, and tokens of each, of the calibration text.
_CALIBRATION = (16, 512)

Forward = Callable[[Any, np.ndarray], jax.Array]


def forward_of(model: ModelConfig, kv_dtype: str) -> Forward:
    """forward(params, tokens [T]) -> scores [T, V]: the engine's model, one prompt.

    Args:
      model: its shapes.
      kv_dtype: of the pages that keys and values go through.
    """
    module = build_model(model, "float32")

    @jax.jit
    def forward(params: Any, tokens_T: jax.Array) -> jax.Array:
        num_pages = pages_of(tokens_T.shape[0], _PAGE) + 1
        cache = kv.allocate(model, num_pages=num_pages, page_size=_PAGE, dtype=kv_dtype)
        inputs = whole_prompt(tokens_T, _PAGE)
        output, _ = module.apply({"params": params}, cache, inputs)
        return module.apply({"params": params}, output.hidden_BTD[0], method="logits")

    return forward


class Wanted(NamedTuple):
    """What the name of a scheme asks for; None leaves the weights as they came."""

    rounding: Rounding | None
    method: Method | None = None
    kv_dtype: str = "float32"


def scheme_of(name: str) -> Wanted:
    """Reads the name of a scheme.

    Raises:
      ValueError: no such scheme.
    """
    if name in _KV:
        return Wanted(None, kv_dtype=_KV[name])
    prefix, _, rest = name.partition("-")
    method = {"awq": "awq", "gptq": "gptq", "w8a8": "smooth" if rest else None}
    plain = f"int4-{rest}" if prefix in ("rtn", "awq", "gptq") else name
    scheme = parse_scheme("w8a8" if name == "w8a8-smooth" else plain)
    skip = EngineConfig().quantization_skip
    return Wanted(Rounding(scheme=scheme, skip=skip), method.get(prefix))  # type: ignore[arg-type]


def compare(
    base: Checkpoint, name: str, texts: list[np.ndarray], base_forward: Forward
) -> dict[str, Any]:
    """A line of the report.

    Args:
      base: the model as it came, in float32.
      name: of the scheme.
      texts: windows of T + 1 tokens.
      base_forward: of `forward_of` with float32 pages.

    Raises:
      ValueError: no such scheme, or one that does not fit the model.
    """
    wanted = scheme_of(name)
    other = quantized(base, wanted)
    forward = base_forward
    if wanted.rounding is not None or wanted.kv_dtype != "float32":
        forward = forward_of(base.config, wanted.kv_dtype)
    found = Agreement()
    for window in texts:
        both = (
            run(params, window[:-1])
            for run, params in ((base_forward, base.params), (forward, other.params))
        )
        found.add(*(np.asarray(logits) for logits in both), window[1:])
    page = kv.allocate(base.config, num_pages=1, page_size=_PAGE, dtype=wanted.kv_dtype)
    return {
        "scheme": name,
        **found.facts(),
        "bytes": tree_bytes(other.params),
        "base_bytes": tree_bytes(base.params),
        "kv_bytes_per_token": kv.page_bytes(page) // _PAGE,
        "layer_error": layer_errors(base.params, other.params),
    }


def quantized(base: Checkpoint, wanted: Wanted) -> Checkpoint:
    """The model in a scheme, calibrated where it asks for that."""
    if wanted.rounding is None or wanted.method is None:
        return round_checkpoint(base, wanted.rounding)
    prompts = fold_ids(load_workload("offline"), base.config.vocab_size).prompts
    length = min(_CALIBRATION[1], base.config.context_len)
    texts = [w[:-1] for w in windows(prompts, length, math.prod(_CALIBRATION))]
    return calibrated(base, wanted.rounding, wanted.method, texts)


def layer_errors(base: dict, other: dict) -> dict[str, float]:
    """Relative error of every quantized weight, by its path."""
    plain = dict(jax.tree_util.tree_leaves_with_path(base))
    errors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(other, is_leaf=is_quantized):
        if is_quantized(leaf):
            name = "/".join(str(key.key) for key in path)
            weights = np.asarray(plain[path]), np.asarray(leaf.dequantized())
            errors[name] = relative_error(*weights)
    return errors


def table(lines: list[dict[str, Any]]) -> str:
    """The report for people."""
    rows = [
        "scheme       perplexity  increase   KL mean    KL p99   top-1      MB  worst"
    ]
    for line in lines:
        worst = max(line["layer_error"].values(), default=0.0)
        rows.append(
            f"{line['scheme']:<12} {line['perplexity']:>10.3f} "
            f"{line['perplexity_increase']:>9.2%} {line['kl_mean']:>9.5f} "
            f"{line['kl_p99']:>9.4f} {line['top1_agreement']:>7.2%} "
            f"{line['bytes'] / 1e6:>7.1f} {worst:>6.3f}"
        )
    return "\n".join(rows)


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
    for name in FLAGS.schemes:
        scheme_of(name)
    base = _checkpoint()
    texts = windows(_text(base), FLAGS.window_tokens, FLAGS.num_tokens)
    base_forward = forward_of(base.config, "float32")
    lines = [compare(base, name, texts, base_forward) for name in FLAGS.schemes]
    print(table(lines))
    for line in lines:
        print(json.dumps(line))
    if FLAGS.plot:
        plot(lines, FLAGS.plot)
    return 0


def _checkpoint() -> Checkpoint:
    model, _ = engine_flags.engine_settings()
    if model is not None and FLAGS.model is None:
        from headrace.checkpoints.synthetic import synthetic_checkpoint

        return synthetic_checkpoint(model, seed=FLAGS.weights_seed)
    name = FLAGS.model or engine_flags.DEFAULT_MODEL
    return load_checkpoint(name, cache_dir=FLAGS.cache_dir)


def _text(base: Checkpoint) -> list[list[int]]:
    if FLAGS.text is None:
        return fold_ids(load_workload("long"), base.config.vocab_size).prompts
    if base.tokenizer is None:
        raise ValueError(f"--text={FLAGS.text} needs a model with a tokenizer")
    text = pathlib.Path(FLAGS.text).read_text(encoding="utf-8")
    return [list(HFTokenizer(base.tokenizer).encode(text))]


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    if len(argv) > 1:
        print(f"error: only flags are taken, got {argv[1:]}", file=sys.stderr)
        return 1
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
