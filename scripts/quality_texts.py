"""The texts of a quality report, by flags: what is predicted, what is calibrated on."""

import pathlib

import numpy as np
from absl import flags

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.load import load_checkpoint
from headrace.configs.kv_types import KV_8BIT, check_kv_skip
from headrace.configs.schema import EngineConfig
from headrace.engine.tokenizer import HFTokenizer
from headrace.layers.kv_cache import KVStorage
from headrace.scripts import engine_flags
from headrace.scripts.bench_throughput import fold_ids, load_workload
from headrace.scripts.quality_metrics import windows
from headrace.scripts.quality_needle import Needle, needles

FLAGS = flags.FLAGS

flags.DEFINE_string("text", None, "File of text; default: the workload `long`.")
flags.DEFINE_string(
    "calibration_text", None, "File of text; default: the workload `offline`."
)
flags.DEFINE_integer("num_tokens", 8192, "Predicted tokens, at most.", lower_bound=1)
flags.DEFINE_integer("window_tokens", 1024, "Of a window of text.", lower_bound=8)
flags.DEFINE_integer(
    "num_needles", 10, "Contexts searched where KV is quantized.", lower_bound=0
)

# Windows, and tokens of each, of the calibration text.
_CALIBRATION = (16, 512)


def base_checkpoint() -> Checkpoint:
    """The model of the flags, in float32."""
    model, engine = engine_flags.engine_settings()
    if engine.quantization is not None or engine.keep_packed:
        raise ValueError("the base is not quantized: no --quantization, --keep_packed")
    if model is not None and FLAGS.model is None:
        from headrace.checkpoints.synthetic import synthetic_checkpoint

        return synthetic_checkpoint(model, seed=FLAGS.weights_seed)
    name = FLAGS.model or engine_flags.DEFAULT_MODEL
    return load_checkpoint(name, cache_dir=FLAGS.cache_dir)


def report_windows(base: Checkpoint) -> list[np.ndarray]:
    """What both models predict.

    Raises:
      ValueError: too little text, or no tokenizer to read it with.
    """
    ids = _text(base, FLAGS.text, "long")
    return windows(ids, FLAGS.window_tokens, FLAGS.num_tokens)


def report_needles(base: Checkpoint) -> list[Needle]:
    """Contexts of a window's length; none where the model has no tokenizer."""
    if base.tokenizer is None or not FLAGS.num_needles:
        return []
    filler = [i for text in _text(base, FLAGS.text, "long") for i in text]
    encode = HFTokenizer(base.tokenizer).encode
    return needles(encode, filler, FLAGS.window_tokens, FLAGS.num_needles)


def calibration_windows(base: Checkpoint) -> list[np.ndarray]:
    """What scales and errors are measured on."""
    ids = _text(base, FLAGS.calibration_text, "offline")
    count, length = _CALIBRATION
    length = min(length, base.config.context_len)
    return [w[:-1] for w in windows(ids, length, count * length)]


def calibration_name() -> str:
    """What the text of `calibration_windows` is called."""
    return FLAGS.calibration_text or "the workload offline"


def kv_storage(base: Checkpoint, dtype: str) -> KVStorage:
    """Of a report's scheme, with the layers that --kv_dtype_skip leaves out.

    Raises:
      ValueError: there are no such layers, or it leaves out all.
    """
    if dtype not in KV_8BIT:
        return KVStorage(dtype=dtype)
    skip = engine_flags.kv_dtype_skip(EngineConfig())
    check_kv_skip(skip, dtype, base.config.num_layers)
    return KVStorage(dtype=dtype, skip=skip)


def _text(base: Checkpoint, path: str | None, workload: str) -> list[list[int]]:
    if path is None:
        return fold_ids(load_workload(workload), base.config.vocab_size).prompts
    if base.tokenizer is None:
        raise ValueError(f"the text {path} needs a model with a tokenizer")
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return [list(HFTokenizer(base.tokenizer).encode(text))]
