"""Loads what a config's `draft` names, and refuses what does not fit the target."""

import dataclasses
import functools
import os

import jax

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.draft_heads import load_eagle, load_medusa
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.configs.drafts import DraftShapes, parse_draft
from headrace.configs.quantization import parse_scheme
from headrace.configs.schema import EngineConfig
from headrace.engine import sizing
from headrace.engine.device_facts import place_params
from headrace.layers.inputs import Params
from headrace.layers.quantized import tree_bytes

Loaded = tuple[DraftShapes, Params]


def load_draft(
    target: Checkpoint,
    config: EngineConfig,
    facts: sizing.DeviceFacts,
    cache_dir: str | os.PathLike[str] | None,
) -> tuple[EngineConfig, Params]:
    """The proposer's weights.

    Args:
      target: the model that verifies, as it is served.
      config: sizes may be open.
      facts: of the device.
      cache_dir: see LLM.

    Returns:
      The config with the shapes of what was loaded, and its parameters, on the device
      but for those that it shares with the target, which are the target's own.

    Raises:
      ValueError: there is no such model, it is made for another vocabulary or target,
        or it has no room for the context.
    """
    if config.draft is None:
        return config, {}
    spec = parse_draft(config.draft)
    dtype = config.param_dtype or sizing.default_dtype(facts)
    if spec.kind == "prompt-lookup":
        return config, {}
    if spec.kind == "self-layers":
        shapes, params = _first_layers(target, int(spec.argument))
    elif spec.kind == "self-quantized":
        shapes, params = _rounded(target, spec.argument, config.quantization_skip)
    elif spec.kind == "medusa":
        shapes, params = _medusa(target, spec.argument, config.num_drafts, dtype)
    elif spec.kind == "eagle":
        shapes, params = _eagle(target, spec.argument, dtype)
    else:
        draft = load_checkpoint(spec.argument, dtype=dtype, cache_dir=cache_dir)
        shapes, params = _model(target, draft, config)
    return dataclasses.replace(config, draft_shapes=shapes), params


def _first_layers(target: Checkpoint, num_layers: int) -> Loaded:
    total = target.config.num_layers
    if num_layers >= total:
        raise ValueError(
            f"draft 'self:{num_layers}' needs a target of more layers; this one has "
            f"{total}, so at most self:{total - 1}"
        )
    wanted = [f"layer_{index}" for index in range(num_layers)]
    params = {
        name: part
        for name, part in target.params.items()
        if not name.startswith("layer_") or name in wanted
    }
    model = dataclasses.replace(target.config, num_layers=num_layers)
    return DraftShapes(model=model, weights_bytes=0), params


def _rounded(target: Checkpoint, scheme: str, skip: tuple[str, ...]) -> Loaded:
    if target.quantization is not None:
        raise ValueError(
            f"draft 'self:{scheme}' rounds the target's weights, which are quantized "
            f"already, as {target.quantization}; draft with some of its layers instead"
        )
    rounding = Rounding(scheme=parse_scheme(scheme), skip=skip)
    params = round_checkpoint(target, rounding).params
    theirs = set(map(id, jax.tree.leaves(target.params)))
    own = [leaf for leaf in jax.tree.leaves(params) if id(leaf) not in theirs]
    shapes = DraftShapes(model=target.config, weights_bytes=tree_bytes(own))
    return shapes, params


def _model(target: Checkpoint, draft: Checkpoint, config: EngineConfig) -> Loaded:
    check_vocabulary(target, draft)
    longest = config.max_context_len or target.config.context_len
    if draft.config.context_len < longest:
        raise ValueError(
            f"the draft model's context_len {draft.config.context_len} is shorter than "
            f"max_context_len {longest}; lower that to what both have"
        )
    shapes = DraftShapes(
        model=draft.config, weights_bytes=tree_bytes(draft.params), has_pages=True
    )
    return shapes, draft.params


def _medusa(target: Checkpoint, path: str, num_drafts: int, dtype: str) -> Loaded:
    head = load_medusa(
        path, target.config, functools.partial(place_params, dtype=dtype)
    )
    if num_drafts > (most := len(head.params)):
        raise ValueError(
            f"num_drafts must be at most {most}, the number of Medusa heads in {path}, "
            f"got {num_drafts}"
        )
    shapes = DraftShapes(
        model=dataclasses.replace(target.config, num_layers=1),
        weights_bytes=tree_bytes(head.params),
        hidden_dim=target.config.model_dim,
    )
    return shapes, head.params


def _eagle(target: Checkpoint, path: str, dtype: str) -> Loaded:
    head = load_eagle(path, target.config, functools.partial(place_params, dtype=dtype))
    assert head.config is not None
    shapes = DraftShapes(
        model=head.config,
        weights_bytes=tree_bytes(head.params),
        has_pages=True,
        hidden_dim=target.config.model_dim * max(1, len(head.aux_layers)),
        aux_layers=head.aux_layers,
        draft_vocab=head.draft_vocab,
    )
    return shapes, head.params


def check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Whether token ids mean the same to both.

    Raises:
      ValueError: they do not.
    """
    theirs, ours = draft.config.vocab_size, target.config.vocab_size
    if theirs != ours:
        raise ValueError(
            f"the draft model has a vocabulary of {theirs} tokens, the target of "
            f"{ours}; they must be the same"
        )
    specs = target.tokenizer, draft.tokenizer
    if specs[0] is None or specs[1] is None:
        return
    from tokenizers import Tokenizer

    mine, other = (
        Tokenizer.from_str(spec.tokenizer_json).get_vocab()
        for spec in specs
        if spec is not None
    )
    for word in mine.keys() | other.keys():
        if mine.get(word) != other.get(word):
            raise ValueError(
                f"draft model and target have other vocabularies: {word!r} is token "
                f"{other.get(word)} of the one, {mine.get(word)} of the other"
            )
