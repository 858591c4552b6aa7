"""The programs of one engine step, from shapes alone, and what they must move.

No array is made. jax is imported on first use.
"""

import dataclasses
from typing import Any

from headrace.configs.schema import EngineConfig, ModelConfig

_DTYPE, _DTYPE_BYTES = "bfloat16", 2
GENERATING = ("decode", "verify")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSizes:
    """A step to compile.

    Attributes:
      model: its shapes.
      rows: of the decode batch.
      context: tokens that each of them holds; also the context of the prompt.
      chunk: prompt tokens of a prefill call.
      engine: of which counts how its weights are quantized.
    """

    model: ModelConfig
    rows: int
    context: int
    chunk: int
    engine: EngineConfig = EngineConfig()

    @property
    def places(self) -> int:
        """Tokens of a row in a decode step: its last one, and drafts."""
        return 1 + self.engine.drafts_per_pass

    @property
    def logits_bytes(self) -> int:
        """Of all rows and places, in float32."""
        return self.rows * self.places * self.model.vocab_size * 4

    @property
    def layer_bytes(self) -> int:
        """Weights of a layer."""
        one, two = (
            dataclasses.replace(
                self, model=dataclasses.replace(self.model, num_layers=n)
            ).weights_bytes
            for n in (1, 2)
        )
        return two - one

    @property
    def weights_bytes(self) -> int:
        """Of all parameters, by what the quantization says."""
        from headrace.engine.weight_sizes import weights_bytes

        return weights_bytes(self.model, self._stored)

    @property
    def _stored(self) -> EngineConfig:
        return dataclasses.replace(self.engine, param_dtype=_DTYPE)

    def live_tokens(self, kind: str) -> int:
        """Tokens whose keys and values a program reads in each layer."""
        if kind in GENERATING:
            return self.rows * self.context
        return self.context if kind == "prefill" else 0

    def live_elements(self, kind: str) -> int:
        """Numbers in the live keys, or values, of one layer."""
        return self.live_tokens(kind) * self.model.num_kv_heads * self.model.head_dim

    def kv_bytes(self, kind: str) -> int:
        """Live tokens times bytes per token."""
        from headrace.engine.memory_sizes import page_bytes

        return self.live_tokens(kind) * page_bytes(self.model, 1, _DTYPE)

    def loaded_kv_bytes(self, kind: str) -> int:
        """What the Mosaic kernels load of the pages; those of a chunk, also from L2."""
        from headrace.engine.memory_sizes import page_bytes
        from headrace.pallas_kernels.paged_attention.api import loaded_keys

        rows, tokens = (
            (1, self.chunk) if kind == "prefill" else (self.rows, self.places)
        )
        model = self.model
        keys = loaded_keys(tokens, model.group_size, model.head_dim, self.context)
        return rows * keys * page_bytes(model, 1, _DTYPE)

    def floor_bytes(self, kind: str) -> int:
        """Least that a program reads of weights: each once, of a table the rows needed.

        Of a sample program it is the logits.
        """
        from headrace.engine.weight_sizes import parameter_bytes

        if kind == "sample":
            return self.logits_bytes
        tokens = self.rows * self.places if kind in GENERATING else self.chunk
        unread, taken = (
            parameter_bytes("embedding", (rows, self.model.model_dim), self._stored)
            for rows in (self.model.vocab_size, tokens)
        )
        if self.model.tie_embeddings:
            unread = 0
        return self.weights_bytes - unread + taken

    def temporary_limits(self, kind: str) -> dict[str, int]:
        """Names and sizes of what a program must not hold besides its arguments."""
        if kind == "sample":
            return {"five arrays of logits": 5 * self.logits_bytes}
        limits = {"the weights of a layer": self.layer_bytes}
        if kind in GENERATING:
            gathered = 2 * self.live_elements(kind) * _DTYPE_BYTES
            limits["the gathered cache of a layer"] = gathered
            limits["64 MB"] = 64_000_000
        else:
            half = self.chunk * 2 * self.model.ffw_dim * _DTYPE_BYTES
            limits["two outputs of gate and up"] = 2 * half
        return limits


def step_programs(sizes: StepSizes, config: EngineConfig) -> dict[tuple, Any]:
    """Decode or verify, prefill, sample: key -> `engine.programs.Program`.

    Args:
      sizes: of the step.
      config: an engine whose buckets and pool are made to fit `sizes`.
    """
    from headrace.engine.programs import VARIANTS

    keys = [
        *((kind, sizes.rows) for kind in config.generating_kinds),
        ("prefill", (1, sizes.chunk)),
        *(("sample", variant, sizes.rows) for variant in VARIANTS),
    ]
    return described(sizes.model, fitted(sizes, config), keys)


def engine_programs(model: ModelConfig, config: EngineConfig) -> dict[tuple, Any]:
    """Every program of an engine: key -> `engine.programs.Program`, as in its ledger.

    Args:
      model: its shapes.
      config: resolved.
    """
    from headrace.engine.memory_sizes import num_host_pages
    from headrace.engine.programs import program_keys

    keys = program_keys(config, can_move=num_host_pages(model, config) > 0)
    return described(model, config, keys)


def described(
    model: ModelConfig, config: EngineConfig, keys: list[tuple]
) -> dict[tuple, Any]:
    """The programs of some keys, over shapes in place of an engine's arrays."""
    import jax
    import jax.numpy as jnp

    from headrace.checkpoints.quantize import Rounding, quantized_shapes
    from headrace.engine import programs
    from headrace.engine.packed_layout import layout_of
    from headrace.engine.processors import empty_extras
    from headrace.engine.proposers import (
        build_target,
        cache_shapes,
        drafting_of,
        proposer_of,
    )
    from headrace.engine.sampling_params import num_top
    from headrace.engine.slots import empty_slots
    from headrace.layers.models import param_shapes

    assert config.num_pages and config.num_slots
    assert config.param_dtype and config.kv_dtype
    rows, vocab_size = config.num_slots, model.vocab_size
    layout = layout_of(config)
    operands = programs.Operands(
        params=quantized_shapes(
            param_shapes(model), config.param_dtype, Rounding.of(config)
        ),
        kv_cache=cache_shapes(model, config),
        logits_BQV=jax.ShapeDtypeStruct(
            (rows, 1 + layout.num_drafts, vocab_size), jnp.float32
        ),
        slots=jax.eval_shape(lambda: empty_slots(layout)),
        extras=jax.eval_shape(
            lambda: empty_extras(rows, vocab_size, config.max_bad_words)
        ),
        drafting=jax.eval_shape(lambda: drafting_of(model, config)),
    )
    options = {
        "model": build_target(model, config),
        "layout": layout,
        "num_top": num_top(config.max_logprobs),
        "proposer": proposer_of(model, config),
        "acceptance": config.acceptance,
    }
    return {key: programs.describe(key, operands, **options) for key in keys}


def fitted(sizes: StepSizes, config: EngineConfig) -> EngineConfig:
    """The config with buckets, page tables and a pool for just this step."""
    pages = sizes.rows * -(-sizes.context // config.page_size) + 1
    return dataclasses.replace(
        config,
        num_slots=sizes.rows,
        decode_batch_sizes=(sizes.rows,),
        prefill_shapes=((1, sizes.chunk),),
        max_context_len=config.max_context_len or sizes.context,
        num_pages=pages,
        param_dtype=_DTYPE,
        kv_dtype=_DTYPE,
    )
