"""One declarative map per family: our parameter -> source tensors and how they join.

Source names are those of Hugging Face checkpoints; other formats translate theirs
first. Strict both ways: a missing tensor and an unused one are errors that name it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from headrace.checkpoints.int4_bytes import weight_shape
from headrace.checkpoints.joins import PACK_QKV, SINGLE, STACK, HostWeight, Join
from headrace.configs.schema import ModelConfig
from headrace.layers.models import param_shapes


class TensorSource(Protocol):
    """Named tensors that are read one at a time."""

    def names(self) -> Iterable[str]:
        """All names, in Hugging Face's terms."""
        ...

    def read(self, name: str) -> HostWeight:
        """One tensor, (out, in), an array or in fewer bits."""
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters.

    Attributes:
      path: keys in the parameter tree.
      sources: names of the tensors it is made of.
      join: makes one parameter of them.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    join: Join


def llama_map(config: ModelConfig) -> list[Entry]:
    """Llama 2/3.x and SmolLM2."""
    entries = [
        Entry(("embedding",), ("model.embed_tokens.weight",), SINGLE),
        Entry(("final_norm",), ("model.norm.weight",), SINGLE),
    ]
    if not config.tie_embeddings:
        entries.append(Entry(("head",), ("lm_head.weight",), SINGLE))
    per_layer: list[tuple[str, tuple[str, ...], Join]] = [
        ("attention_norm", ("input_layernorm",), SINGLE),
        ("qkv", tuple(f"self_attn.{x}_proj" for x in "qkv"), PACK_QKV),
        ("out", ("self_attn.o_proj",), SINGLE),
        ("mlp_norm", ("post_attention_layernorm",), SINGLE),
        ("gate_up", ("mlp.gate_proj", "mlp.up_proj"), STACK),
        ("down", ("mlp.down_proj",), SINGLE),
    ]
    for layer in range(config.num_layers):
        for key, parts, join in per_layer:
            names = tuple(f"model.layers.{layer}.{part}.weight" for part in parts)
            entries.append(Entry((f"layer_{layer}", key), names, join))
    return entries


FAMILY_MAPS = {"llama": llama_map}


def source_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape that each source tensor must have."""
    D, F, H, V = config.model_dim, config.ffw_dim, config.head_dim, config.vocab_size
    by_suffix = {
        "embed_tokens": (V, D),
        "lm_head": (V, D),
        "q_proj": (config.num_heads * H, D),
        "k_proj": (config.num_kv_heads * H, D),
        "v_proj": (config.num_kv_heads * H, D),
        "o_proj": (D, config.num_heads * H),
        "gate_proj": (F, D),
        "up_proj": (F, D),
        "down_proj": (D, F),
    }
    shapes = {}
    for entry in FAMILY_MAPS[config.family](config):
        for name in entry.sources:
            shapes[name] = by_suffix.get(name.split(".")[-2], (D,))
    return shapes


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new: derived tables, and the copy of a tied head."""
    tied_head = name == "lm_head.weight" and config.tie_embeddings
    return tied_head or name.endswith("rotary_emb.inv_freq")


def assemble(
    config: ModelConfig,
    source: TensorSource,
    place: Callable[[tuple[str, ...], Any], object],
) -> dict:
    """Reads a source into a parameter tree, one parameter at a time.

    Args:
      config: of the model.
      source: the tensors.
      place: gets a parameter's path and what it is, an array, a QuantizedTensor of
        host arrays or a tuple of parts; returns what the tree holds. Called as soon as
        a parameter is read, so that the host holds one at a time.

    Raises:
      ValueError: a tensor is missing, unused, or has another shape than the config
        says; it is named.
    """
    shapes = _checked_shapes(config, set(source.names()))
    entries = FAMILY_MAPS[config.family](config)
    expected = param_shapes(config)
    tree: dict = {}
    for entry in entries:
        weight = entry.join(
            config, [_read(source, name, shapes[name]) for name in entry.sources]
        )
        if not isinstance(weight, tuple):
            assert weight_shape(weight) == _at(expected, entry.path), entry.path
        node = tree
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = place(entry.path, weight)
        del weight  # not held while the next one is read
    return tree


def _checked_shapes(
    config: ModelConfig, present: set[str]
) -> dict[str, tuple[int, ...]]:
    """`source_shapes`, once the names that are present are those of the family."""
    # Before anything is made per layer: a damaged count may say billions.
    if config.num_layers > len(present):
        raise ValueError(
            f"the config says {config.num_layers} layers, the checkpoint has no more "
            f"than {len(present)} tensors"
        )
    shapes = source_shapes(config)
    missing = sorted(shapes.keys() - present)
    if missing:
        raise ValueError(f"the checkpoint lacks {_some(missing)}")
    unused = sorted(n for n in present - shapes.keys() if not _is_ignorable(n, config))
    if unused:
        raise ValueError(
            f"the checkpoint has tensors that family {config.family!r} does not know: "
            f"{_some(unused)}"
        )
    return shapes


def _read(source: TensorSource, name: str, shape: tuple[int, ...]) -> HostWeight:
    weight = source.read(name)
    if weight_shape(weight) != shape:
        raise ValueError(
            f"tensor {name} has shape {weight_shape(weight)}, the config says {shape}"
        )
    return weight


def _at(tree: Mapping, path: tuple[str, ...]) -> tuple[int, ...]:
    for key in path:
        tree = tree[key]
    return tree  # type: ignore[return-value]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
