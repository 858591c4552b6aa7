"""Bytes of a model's parameters on its device, from shapes alone."""

import fnmatch
import math
from collections.abc import Iterator

from headrace.configs.quantization import parse_scheme
from headrace.configs.schema import EngineConfig, ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def num_params(model: ModelConfig) -> int:
    """Parameters of the model, tied ones counted once."""
    return sum(math.prod(shape) * count for _, shape, count in _parameters(model))


def weights_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the parameters on the device, scales of quantized ones included.

    Args:
      model: its shapes.
      config: with resolved storage types.

    Raises:
      ValueError: a group size that does not divide the inputs of a weight.
    """
    return sum(
        parameter_bytes(path, shape, config)
        for name, shape, count in _parameters(model)
        for path in _paths(name, count)
    )


def draft_weights_bytes(config: EngineConfig) -> int:
    """Bytes of a proposer's own parameters."""
    return 0 if config.draft_shapes is None else config.draft_shapes.weights_bytes


def parameter_bytes(path: str, shape: tuple[int, ...], config: EngineConfig) -> int:
    """Bytes of one parameter.

    Args:
      path: in the tree, such as "layer_0/out".
      shape: as (out, in), or a norm's.
      config: see `weights_bytes`.
    """
    assert config.param_dtype
    is_skipped = any(fnmatch.fnmatch(path, p) for p in config.quantization_skip)
    if config.quantization is None or len(shape) < 2 or is_skipped:
        return math.prod(shape) * DTYPE_BYTES[config.param_dtype]
    return parse_scheme(config.quantization).weight_bytes(*shape)


def _parameters(model: ModelConfig) -> list[tuple[str, tuple[int, ...], int]]:
    """Names, shapes as (out, in), and in how many layers they are; 1 is the model's."""
    D, F, H = model.model_dim, model.ffw_dim, model.head_dim
    N, K, L = model.num_heads, model.num_kv_heads, model.num_layers
    tables = ["embedding"] if model.tie_embeddings else ["embedding", "head"]
    return [
        *((name, (model.vocab_size, D), 1) for name in tables),
        ("final_norm", (D,), 1),
        *(("layer/" + name, shape, L) for name, shape in (
            ("attention_norm", (D,)),
            ("qkv", ((N + 2 * K) * H, D)),
            ("out", (D, N * H)),
            ("mlp_norm", (D,)),
            ("gate_up", (2 * F, D)),
            ("down", (D, F)),
        )),
    ]  # fmt: skip


def _paths(name: str, count: int) -> Iterator[str]:
    """As they stand in the parameter tree."""
    kind, _, rest = name.partition("/")
    return (f"layer_{i}/{rest}" for i in range(count)) if rest else iter((kind,))
