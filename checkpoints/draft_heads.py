"""Medusa and EAGLE heads from the public safetensors layouts.

Medusa    medusa_lm_head.safetensors (or model.safetensors), config.json with
          medusa_num_heads and medusa_num_layers; of head i the residual blocks
          `i.j.linear.weight` and `.bias`, then its output head `i.J.weight`
EAGLE     model.safetensors, a Llama's config.json; `fc` [D, 2 D] with or without a
          bias, `layers.0.*` without an input_layernorm; `embed_tokens` is the target's
EAGLE-3   likewise with `midlayer.*`, whose attention reads 2 D, `hidden_norm`,
          `norm`, `lm_head` [W, D], and `d2t` [W]: draft id + d2t is a token id
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.checkpoints import hf_config
from headrace.checkpoints.joins import PACK_QKV, STACK
from headrace.checkpoints.safetensors_source import SafetensorsSource
from headrace.configs.schema import ModelConfig

Place = Callable[[np.ndarray], Any]
_MEDUSA_FILE = "medusa_lm_head.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A head as it is read.

    Attributes:
      params: as `layers.models.eagle.Eagle` or `engine.draft_heads.Medusa` name them.
      config: of an EAGLE head's layer; a Medusa head has none.
      aux_layers: inner layers of the target that an EAGLE-3 head fuses.
      draft_vocab: rows of an EAGLE-3 head's own head.
    """

    params: dict
    config: ModelConfig | None = None
    aux_layers: tuple[int, ...] = ()
    draft_vocab: int = 0


class _Tensors:
    """Named tensors of which each must be used, and have a shape."""

    def __init__(self, source: SafetensorsSource, folder: pathlib.Path) -> None:
        self._source, self._folder = source, folder
        self._left = set(source.names())

    def take(self, name: str, *shape: int) -> np.ndarray:
        if name not in self._left:
            raise ValueError(f"{self._folder} lacks {name}")
        self._left.discard(name)
        found = self._source.read(name)
        if found.shape != shape:
            raise ValueError(
                f"{self._folder}: {name} has shape {found.shape}, and a head for this "
                f"target {shape}: it is made for another model"
            )
        return found

    def has(self, name: str) -> bool:
        return name in self._left

    def ignore(self, *names: str) -> None:
        self._left -= set(names)

    def integers(self, name: str) -> np.ndarray:
        self._left.discard(name)
        return self._source.stored(name)

    def finish(self) -> None:
        if self._left:
            raise ValueError(
                f"{self._folder} has tensors that no such head has: "
                f"{', '.join(sorted(self._left)[:5])}"
            )


def load_medusa(path: str, target: ModelConfig, place: Place) -> DraftHead:
    """Loads Medusa heads.

    Args:
      path: a folder.
      target: the model that they are made for.
      place: brings an array to the device.

    Raises:
      ValueError: no such heads, or they are made for another model.
    """
    folder = pathlib.Path(path).expanduser()
    raw = hf_config.read_json(folder / "config.json")
    name = _MEDUSA_FILE if (folder / _MEDUSA_FILE).is_file() else None
    tensors = _Tensors(SafetensorsSource(folder, name), folder)
    heads, layers = raw.get("medusa_num_heads"), raw.get("medusa_num_layers", 1)
    if not isinstance(heads, int) or not isinstance(layers, int) or heads < 1:
        raise ValueError(
            f"{folder}/config.json must say medusa_num_heads and medusa_num_layers, "
            f"got {heads!r} and {layers!r}"
        )
    prefix = "medusa_head." if tensors.has(f"medusa_head.0.{layers}.weight") else ""
    D, V = target.model_dim, target.vocab_size
    params: dict = {}
    for i in range(heads):
        part = params[f"head_{i}"] = {}
        for j in range(layers):
            block = f"{prefix}{i}.{j}.linear"
            part[f"block_{j}"] = {
                "weight": place(tensors.take(f"{block}.weight", D, D)),
                "bias": place(tensors.take(f"{block}.bias", D)),
            }
        part["head"] = place(tensors.take(f"{prefix}{i}.{layers}.weight", V, D))
    tensors.finish()
    return DraftHead(params=params)


def load_eagle(path: str, target: ModelConfig, place: Place) -> DraftHead:
    """Loads an EAGLE head of the first or third kind; arguments as `load_medusa`."""
    folder = pathlib.Path(path).expanduser()
    tensors = _Tensors(SafetensorsSource(folder), folder)
    fuses = tensors.has("midlayer.hidden_norm.weight")
    config = _layer_config(folder, target)
    D, V = target.model_dim, target.vocab_size
    tensors.ignore("embed_tokens.weight", "t2d")  # the target's; what d2t says anyway
    aux_layers: tuple[int, ...] = ()
    draft_vocab = 0
    if fuses:
        aux_layers = _aux_layers(folder, target)
        params, draft_vocab = _fusing(tensors, len(aux_layers), D, V)
        params |= _layer(tensors, "midlayer", config, 2 * D)
    else:
        params = {"fc": tensors.take("fc.weight", D, 2 * D)}
        has_bias = tensors.has("fc.bias")
        zeros = np.zeros(D, np.float32)
        params["fc_bias"] = tensors.take("fc.bias", D) if has_bias else zeros
        params |= _layer(tensors, "layers.0", config, D)
    tensors.finish()
    return DraftHead(
        params={key: place(value) for key, value in params.items()},
        config=config,
        aux_layers=aux_layers,
        draft_vocab=draft_vocab,
    )


def _fusing(tensors: _Tensors, fused: int, D: int, V: int) -> tuple[dict, int]:
    """What the third kind has beside its layer, and how many tokens it drafts."""
    ids = np.arange(V, dtype=np.int32)
    if tensors.has("d2t"):
        offsets = tensors.integers("d2t")
        ids = np.arange(len(offsets), dtype=np.int32) + offsets.astype(np.int32)
    if ids.min() < 0 or ids.max() >= V:
        raise ValueError(
            f"the head drafts token ids from {ids.min()} to {ids.max()}, the target "
            f"has a vocabulary of {V}: it is made for another model"
        )
    params = {
        "fc": tensors.take("fc.weight", D, fused * D),
        "token_norm": tensors.take("midlayer.input_layernorm.weight", D),
        "hidden_norm": tensors.take("midlayer.hidden_norm.weight", D),
        "final_norm": tensors.take("norm.weight", D),
        "head": tensors.take("lm_head.weight", len(ids), D),
        "token_ids": ids,
    }
    return params, len(ids)


def _layer(tensors: _Tensors, name: str, config: ModelConfig, width: int) -> dict:
    """A decoder layer whose attention reads rows of `width`."""
    D, F, H = config.model_dim, config.ffw_dim, config.head_dim
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    qkv: list[Any] = [
        tensors.take(f"{name}.self_attn.{x}_proj.weight", count * H, width)
        for x, count in zip("qkv", heads, strict=True)
    ]
    halves: list[Any] = [
        tensors.take(f"{name}.mlp.{half}_proj.weight", F, D) for half in ("gate", "up")
    ]
    return {
        "qkv": PACK_QKV(config, qkv),
        "out": tensors.take(f"{name}.self_attn.o_proj.weight", D, heads[0] * H),
        "mlp_norm": tensors.take(f"{name}.post_attention_layernorm.weight", D),
        "gate_up": STACK(config, halves),
        "down": tensors.take(f"{name}.mlp.down_proj.weight", D, F),
    }


def _layer_config(folder: pathlib.Path, target: ModelConfig) -> ModelConfig:
    """The target's, with what config.json says of the head's own layer."""
    path = folder / "config.json"
    raw = hf_config.read_json(path)
    width = raw.get("hidden_size", target.model_dim)
    if width != target.model_dim:
        raise ValueError(
            f"{path} says hidden_size {width}, the target has {target.model_dim}: the "
            f"head is made for another model"
        )
    heads = raw.get("num_attention_heads", target.num_heads)
    base, scaling = target.rope_base, target.rope_scaling
    if {"rope_theta", "rope_scaling", "rope_parameters"} & raw.keys():
        base, scaling = hf_config.rope(path, raw)
    return dataclasses.replace(
        target,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or width // heads,
        ffw_dim=raw.get("intermediate_size", target.ffw_dim),
        norm_eps=raw.get("rms_norm_eps", target.norm_eps),
        rope_base=base,
        rope_scaling=scaling,
    )


def _aux_layers(folder: pathlib.Path, target: ModelConfig) -> tuple[int, ...]:
    """What the head fuses: as config.json says, else low, middle and high."""
    path = folder / "config.json"
    said = hf_config.read_json(path).get("eagle_config") or {}
    total = target.num_layers
    layers = said.get("eagle_aux_hidden_state_layer_ids", [2, total // 2, total - 3])
    if sorted(set(layers)) != layers or not 0 <= layers[0] or layers[-1] >= total:
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids must ascend below the target's "
            f"{total} layers, got {layers}"
        )
    return tuple(layers)
