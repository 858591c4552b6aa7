"""The flags that say which engine to build, shared by the scripts, and its building.

--model=NAME                published weights
--config=NAME               random weights of configs/NAME.py: ids in, ids out
--model=NAME --config=NAME  published weights, engine settings of configs/NAME.py
"""

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

from absl import flags

from headrace.configs import config_names, load_config, parse_config
from headrace.configs.schema import EngineConfig, ModelConfig

DEFAULT_MODEL = "smollm2-135m-instruct"

# Of a config and a checkpoint that are used together, these must agree.
SHAPE_FIELDS = (
    "family", "num_layers", "model_dim", "ffw_dim", "num_heads", "num_kv_heads",
    "head_dim", "vocab_size", "tie_embeddings",
)  # fmt: skip

flags.DEFINE_string(
    "model",
    None,
    "Weights: a registry name, a folder, a .gguf file or a hub id. Default: "
    f"{DEFAULT_MODEL}, or the random weights of --config.",
)
flags.DEFINE_enum(
    "config",
    None,
    config_names(),
    "Name of a file in configs/. Without --model: random weights of its model.",
)
flags.DEFINE_integer(
    "weights_seed", 0, "Seed of the random weights of --config.", lower_bound=0
)
flags.DEFINE_integer("num_slots", None, "Requests that decode together.")
flags.DEFINE_integer("max_context_len", None, "Longest prompt plus output, tokens.")
flags.DEFINE_enum(
    "numerics",
    None,
    ["invariant", "fast"],
    "'invariant' keeps a request's bits free of its company.",
)
flags.DEFINE_string(
    "quantization",
    None,
    "Rounds weights while they are loaded: int8, w8a8, fp8, fp8-w8a8, int4-g64, ...",
)
flags.DEFINE_bool(
    "keep_packed", None, "Keeps a .gguf file's tensors in fewer bits where exact."
)
flags.DEFINE_enum(
    "kv_dtype",
    None,
    ["float32", "bfloat16", "int8", "float8_e4m3fn"],
    "Storage type of KV pages.",
)
flags.DEFINE_list(
    "kv_dtype_skip",
    None,
    "Layers whose KV pages have the type of weights, where --kv_dtype has 8 bits.",
)
flags.DEFINE_string(
    "draft",
    None,
    "Who drafts tokens that one pass verifies: 'prompt-lookup', a model, "
    "'self:LAYERS', 'self:SCHEME' such as 'self:int4', 'medusa:PATH', 'eagle:PATH'.",
)
flags.DEFINE_integer("num_drafts", None, "Most drafts per request and pass.")
flags.DEFINE_bool(
    "adapts_drafts", None, "Drafts only while that is faster; on unless said."
)
flags.DEFINE_enum(
    "acceptance",
    None,
    ["exact", "rejection"],
    "'exact' drafts change no token; 'rejection' takes more of them and keeps the "
    "distribution only.",
)
flags.DEFINE_enum(
    "policy",
    None,
    ["fcfs", "priority", "fair", "static"],
    "Who gets a slot next; 'static' decodes whole batches to their end.",
)
flags.DEFINE_integer(
    "host_kv_bytes",
    None,
    "Host memory for the pages of requests that give way; on a CPU 0 unless said.",
    lower_bound=0,
)
flags.DEFINE_string("cache_dir", None, "Where weights and compiled programs are kept.")


_SETTINGS = (
    "num_slots", "max_context_len", "numerics", "policy", "quantization", "kv_dtype",
    "keep_packed", "host_kv_bytes", "draft", "num_drafts",
    "adapts_drafts", "acceptance",
)  # fmt: skip


def engine_settings() -> tuple[ModelConfig | None, EngineConfig]:
    """The flags as a model (None: that of the weights) and an engine config.

    `--num_slots` replaces the decode buckets of `--config` too, since the last of
    them is the number of slots.

    Raises:
      ValueError: a value out of its range.
    """
    FLAGS = flags.FLAGS
    model, engine = None, EngineConfig()
    if FLAGS.config is not None:
        model, engine = parse_config(load_config(FLAGS.config))
    changes = {
        name: FLAGS[name].value for name in _SETTINGS if FLAGS[name].value is not None
    }
    changes["kv_dtype_skip"] = kv_dtype_skip(engine)
    if "num_slots" in changes:
        changes["decode_batch_sizes"] = None
    return model, dataclasses.replace(engine, **changes)


def kv_dtype_skip(engine: EngineConfig) -> tuple[int, ...]:
    """Layers of --kv_dtype_skip; where it is not given, the config's.

    Raises:
      ValueError: not whole numbers.
    """
    layers = flags.FLAGS.kv_dtype_skip
    if layers is None:
        return engine.kv_dtype_skip
    if not all(layer.isdecimal() for layer in layers):
        raise ValueError(f"kv_dtype_skip wants numbers of layers, got {layers}")
    return tuple(int(layer) for layer in layers)


def build_llm(change: Callable[[EngineConfig], EngineConfig] = lambda c: c) -> Any:
    """Builds the engine that the flags ask for.

    Args:
      change: what the script itself changes of the settings.

    Raises:
      ValueError: an unknown model, a setting out of its range, or weights of another
        shape than `--config` says.
    """
    from headrace import LLM  # jax is imported only once the flags are sound

    FLAGS = flags.FLAGS
    model, engine = engine_settings()
    engine = change(engine)
    _quieten_logs()
    if model is not None and FLAGS.model is None:
        from headrace.checkpoints.synthetic import synthetic_checkpoint
        from headrace.engine.device_facts import device_facts
        from headrace.engine.sizing import default_dtype

        dtype = engine.param_dtype or default_dtype(device_facts())
        weights = synthetic_checkpoint(model, seed=FLAGS.weights_seed, dtype=dtype)
        return LLM.from_checkpoint(weights, config=engine, cache_dir=FLAGS.cache_dir)
    llm = LLM(FLAGS.model or DEFAULT_MODEL, config=engine, cache_dir=FLAGS.cache_dir)
    if model is not None:
        _check_same_shapes(llm.model_config, model)
    return llm


def _quieten_logs() -> None:
    """Below --verbosity=1 one line stands for those about each compiled program."""
    is_quiet = flags.FLAGS.verbosity < 1
    if is_quiet:
        print(
            "starting; the first time this compiles for a minute or more "
            "(--verbosity=1 shows what)",
            file=sys.stderr,
        )
    engine_level = logging.WARNING if is_quiet else logging.INFO
    logging.getLogger("headrace.engine").setLevel(engine_level)
    # At --verbosity=1 their debug lines would bury ours.
    for name in ("jax", "orbax", "absl"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _check_same_shapes(weights: ModelConfig, config: ModelConfig) -> None:
    for name in SHAPE_FIELDS:
        have, said = getattr(weights, name), getattr(config, name)
        if have != said:
            raise ValueError(
                f"--config={flags.FLAGS.config} says {name} {said}, the weights of "
                f"--model={flags.FLAGS.model} have {have}"
            )


def exit_code(run: Callable[[], int]) -> int:
    """Runs a script's body; a refusal becomes one line and exit code 1.

    At `--verbosity=1` the traceback is kept.
    """
    try:
        return run()
    except (ValueError, NotImplementedError, OSError) as error:
        if flags.FLAGS.verbosity >= 1:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
