"""The Python client of a Headrace server: `from headrace.client import Client`.

Imports no jax: it runs where no engine does.
"""

from headrace.engine.serving.async_client import AsyncClient
from headrace.engine.serving.client import Client
from headrace.engine.serving.client_results import (
    CallError,
    GenerateResult,
    ModelInfo,
    ScoreResult,
    Tls,
)

__all__ = [
    "AsyncClient", "CallError", "Client", "GenerateResult", "ModelInfo", "ScoreResult",
    "Tls",
]  # fmt: skip
