"""From a model's name to a runner that is compiled, probed and fits the memory.

Everything that can fail at start fails here, before anything is served.
"""

import os

from headrace.checkpoints.cache_dir import cache_dir as default_cache_dir
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.load import load_checkpoint
from headrace.checkpoints.quantize import Rounding, round_checkpoint
from headrace.checkpoints.quantized_tree import with_quantization_of
from headrace.configs.schema import EngineConfig
from headrace.engine import sizing
from headrace.engine.device_facts import (
    layout_of_quantized,
    place_params,
    with_weights_of,
)
from headrace.engine.draft_weights import load_draft
from headrace.engine.model_runner import ModelRunner
from headrace.engine.program_store import ProgramStore, program_key
from headrace.engine.proposer import DRAFT
from headrace.engine.warmup import warm_up

CacheDir = str | os.PathLike[str] | None


def load_model(
    model: str | os.PathLike[str],
    config: EngineConfig,
    facts: sizing.DeviceFacts,
    cache_dir: CacheDir,
) -> Checkpoint:
    """Loads weights in the types that an engine keeps them in.

    Args:
      model: see LLM.
      config: says how weights are stored.
      facts: of the device.
      cache_dir: see LLM.

    Raises:
      ValueError: see `load_checkpoint`.
    """
    return load_checkpoint(
        model,
        dtype=config.param_dtype or sizing.default_dtype(facts),
        rounding=Rounding.of(config),
        keep_packed=config.keep_packed,
        cache_dir=cache_dir,
    )


def compiled_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    facts: sizing.DeviceFacts,
    cache_dir: CacheDir,
) -> tuple[ModelRunner, EngineConfig]:
    """Sizes, places, compiles and probes.

    Args:
      checkpoint: the weights, rounded if `config` says so.
      config: sizes may be open.
      facts: of the device, the memory of weights counted as free.
      cache_dir: see LLM.

    Returns:
      The runner, and the config with all sizes and the buckets that the probe left.

    Raises:
      ValueError: sizes that do not fit the memory, or a probe that fails.
    """
    checkpoint = round_checkpoint(checkpoint, Rounding.of(config))
    config = with_quantization_of(checkpoint, config)
    facts = with_weights_of(checkpoint, facts)
    config, draft_params = load_draft(checkpoint, config, facts, cache_dir)
    resolved = sizing.resolve(checkpoint.config, config, facts)
    assert resolved.param_dtype
    params = checkpoint.params
    if draft_params:
        params = {**params, DRAFT: draft_params}
    params = place_params(params, resolved.param_dtype)
    layout = layout_of_quantized(params)
    key = program_key(checkpoint.config, resolved, layout)
    store = ProgramStore(default_cache_dir(cache_dir) / "programs", key)
    runner = ModelRunner(checkpoint.config, resolved, params, store=store)
    runner.compile_all()
    memory = runner.ledger.memory_facts()
    sizing.check_compiled(checkpoint.config, resolved, facts, memory)
    stored = store.load_facts() or {}
    probed = warm_up(runner, stored)
    found = runner.ledger.facts_to_store(stored)
    if found != stored:
        store.save_facts(found)
    return runner, probed
