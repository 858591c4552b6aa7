"""Headrace: a JAX inference engine for decoder-only language models.

Names are imported when first used, so that `import headrace` costs nothing and the
host-side parts never pull in jax.
"""

import importlib
from typing import Any

_HOMES = {
    "LLM": "headrace.engine.llm",
    "AsyncLLM": "headrace.engine.async_llm",
    "QueueFullError": "headrace.engine.admission",
    "SamplingParams": "headrace.engine.sampling_params",
    "StructuredOutputsParams": "headrace.engine.structured_params",
    "RequestOutput": "headrace.engine.outputs",
    "CompletionOutput": "headrace.engine.outputs",
    "Logprob": "headrace.engine.outputs",
    "ScoreOutput": "headrace.engine.scoring",
    "PerplexityOutput": "headrace.engine.scoring",
    "EngineConfig": "headrace.configs.schema",
    "ModelConfig": "headrace.configs.schema",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
