"""config.json of a Hugging Face folder to ModelConfig.

Says no to what the model code does not do (biases, other activations, other rotary
stretchings) rather than computing something else in silence.
"""

import json
import pathlib
from typing import Any

from headrace.configs.schema import ModelConfig, RopeScaling

_ARCHITECTURES = {"LlamaForCausalLM": "llama"}

# Key -> the values that the model code implements; an absent key means the first.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1.0, None),
    "sliding_window": (None,),
    "compression_config": (None,),
}


def read_json(path: pathlib.Path) -> dict:
    """A JSON object from a file.

    Raises:
      ValueError: no such file, or its content is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def model_config(folder: pathlib.Path) -> ModelConfig:
    """Reads config.json, and further stop ids from generation_config.json.

    Raises:
      ValueError: a missing file or key, or a model that is not supported.
    """
    path = folder / "config.json"
    raw = read_json(path)
    family = _family(path, raw)
    rope_base, rope_scaling = rope(path, raw)
    required = (
        "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    missing = [key for key in required if not isinstance(raw.get(key), int)]
    if missing:
        raise ValueError(f"{path} lacks the whole numbers {missing}")
    heads = raw["num_attention_heads"]
    try:
        return ModelConfig(
            family=family,
            num_layers=raw["num_hidden_layers"],
            model_dim=raw["hidden_size"],
            ffw_dim=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // max(heads, 1),
            vocab_size=raw["vocab_size"],
            context_len=raw["max_position_embeddings"],
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_embeddings=raw.get("tie_word_embeddings", False),
            bos_id=raw.get("bos_token_id"),
            stop_ids=_stop_ids(folder, raw),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def quantization_config(folder: pathlib.Path) -> Any:
    """What config.json says of quantized weights, None where it says nothing."""
    return read_json(folder / "config.json").get("quantization_config")


def _family(path: pathlib.Path, raw: dict) -> Any:
    names = raw.get("architectures") or []
    listed = names if isinstance(names, list) else [names]
    found = [ours for theirs, ours in _ARCHITECTURES.items() if theirs in listed]
    if not found:
        raise ValueError(
            f"{path}: architectures {names} are not supported; known: "
            f"{list(_ARCHITECTURES)}"
        )
    for key, allowed in _FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise ValueError(
                f"{path}: {key} {raw[key]!r} is not supported; known: {list(allowed)}"
            )
    return found[0]


def rope(path: pathlib.Path, raw: dict) -> tuple[float, RopeScaling | None]:
    """Base and stretching, from the older keys or from `rope_parameters`.

    Raises:
      ValueError: a stretching that the model code does not have.
    """
    newer = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or newer
    for name, value in (("rope_parameters", newer), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {name} must be a JSON object, got {value!r}")
    base = newer.get("rope_theta", raw.get("rope_theta", 10000.0))
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise ValueError(f"{path}: rope_theta must be a number, got {base!r}")
    # A factor without a type would stretch in a way that nobody named.
    untyped = None if "factor" in scaling else "default"
    kind = scaling.get("rope_type", scaling.get("type", untyped))
    if kind == "default":
        return float(base), None
    if kind != "llama3":
        raise ValueError(
            f"{path}: rope_type {kind!r} is not supported; known: ['default', 'llama3']"
        )
    keys = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context_len": "original_max_position_embeddings",
    }
    missing = [key for key in keys.values() if key not in scaling]
    if missing:
        raise ValueError(f"{path}: rotary stretching 'llama3' lacks the keys {missing}")
    values = {ours: scaling[theirs] for ours, theirs in keys.items()}
    try:
        return float(base), RopeScaling.from_mapping(values)
    except ValueError as error:
        raise ValueError(f"{path}: rotary stretching 'llama3': {error}") from None


def _stop_ids(folder: pathlib.Path, raw: dict) -> tuple[int, ...]:
    """Every end-of-turn id that either file names, each once.

    Raises:
      ValueError: one of them is no whole number.
    """
    sources = [raw.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.append(read_json(generation).get("eos_token_id"))
    ids: list[int] = []
    for source in sources:
        ids += source if isinstance(source, list) else [source]
    for token_id in ids:
        if token_id is not None and not isinstance(token_id, int):
            raise ValueError(f"eos_token_id must hold whole numbers, got {token_id!r}")
    return tuple(dict.fromkeys(i for i in ids if i is not None))
