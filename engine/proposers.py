"""From a config to the proposer that it names, and to what that keeps on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from headrace.configs.drafts import DraftKind, parse_draft
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.draft_model import DraftModel
from headrace.engine.drafting import Drafting, empty_drafting
from headrace.engine.eagle import EagleChain
from headrace.engine.medusa import Medusa
from headrace.engine.packed_layout import layout_of
from headrace.engine.prompt_lookup import PromptLookup
from headrace.engine.proposer import Proposer
from headrace.layers import kv_cache as kv
from headrace.layers.models import build_model
from headrace.layers.models.eagle import Eagle

SELF_KINDS: tuple[DraftKind, ...] = ("self-layers", "self-quantized")


def proposer_of(model: ModelConfig, config: EngineConfig) -> Proposer | None:
    """The proposer of an engine; None drafts nothing.

    Args:
      model: the target's.
      config: resolved, with the shapes of a draft that has any.
    """
    if config.draft is None:
        return None
    kind, shapes = parse_draft(config.draft).kind, config.draft_shapes
    if kind == "prompt-lookup":
        return PromptLookup()
    assert shapes is not None and config.param_dtype, "the draft is not loaded"
    if kind == "medusa":
        return Medusa()
    groups = 1 + bool(config.kv_dtype_skip)
    if kind == "eagle":
        head = Eagle(
            shapes.model, len(shapes.aux_layers), shapes.draft_vocab, config.param_dtype
        )
        return EagleChain(head, build_target(model, config), groups)
    skip = config.kv_dtype_skip if kind in SELF_KINDS else ()
    return DraftModel(
        model=build_model(
            shapes.model,
            config.param_dtype,
            tuple(layer for layer in skip if layer < shapes.model.num_layers),
        ),
        num_target_groups=groups,
        has_pages=shapes.has_pages,
    )


def build_target(model: ModelConfig, config: EngineConfig) -> Any:
    """The Linen module of the target, which gives what the proposer reads.

    Args:
      model: its shapes.
      config: resolved.
    """
    assert config.param_dtype
    aux_layers = config.draft_shapes.aux_layers if config.draft_shapes else ()
    return build_model(model, config.param_dtype, config.kv_dtype_skip, aux_layers)


def cache_shapes(
    model: ModelConfig, config: EngineConfig
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """Pools of the target's KV groups, then of the proposer's own."""
    assert config.num_pages and config.kv_dtype
    sizes = {"num_pages": config.num_pages, "page_size": config.page_size}
    groups = kv.cache_shapes(model, storage=kv.KVStorage.of(config), **sizes)
    if (shapes := config.draft_shapes) is None or not shapes.has_pages:
        return groups
    storage = kv.KVStorage(dtype=config.kv_dtype)
    return (*groups, *kv.cache_shapes(shapes.model, storage=storage, **sizes))


def drafting_of(model: ModelConfig, config: EngineConfig) -> Drafting | None:
    """An empty state of an engine's proposer; None where it has none."""
    if config.draft is None:
        return None
    layout = layout_of(config)
    B, K, V = layout.num_slots, layout.num_drafts, model.vocab_size
    weights = hidden = None
    # A looked-up draft is certain: there is nothing to weigh.
    if config.acceptance == "rejection" and config.draft != "prompt-lookup":
        weights = jax.ShapeDtypeStruct((B, K, V), jnp.float32)
    if config.draft_shapes is not None and (D := config.draft_shapes.hidden_dim):
        assert config.param_dtype
        hidden = jax.ShapeDtypeStruct((B, 1 + K, D), jnp.dtype(config.param_dtype))
    return empty_drafting(
        layout, adapts=config.adapts_drafts, hidden=hidden, weights=weights
    )
