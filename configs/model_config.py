"""Plain, checked data that describes a model: its shapes and constants."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from headrace.configs.checks import check_choice, check_int, check_range, check_tuple
from headrace.configs.mapping import FromMapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling(FromMapping):
    """Llama-3 stretching of the rotary wavelengths.

    Source: Llama 3.1 model card, `rope_type: llama3` in its config.json.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __post_init__(self) -> None:
        check_range("factor", self.factor, 1.0)
        check_range("low_freq_factor", self.low_freq_factor, 1e-6)
        check_range("high_freq_factor", self.high_freq_factor, 1e-6)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must exceed low_freq_factor "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )
        check_int("original_context_len", self.original_context_len, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(FromMapping):
    """Shapes and constants of one decoder-only model (axis letters: WORKSPACE.md).

    `context_len` is the longest request, prompt and output together, in tokens.
    `stop_ids` end a request unless it ignores them (all end-of-turn ids).
    """

    family: Literal["llama"] = "llama"
    num_layers: int
    model_dim: int  # D
    ffw_dim: int  # F
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    vocab_size: int  # V
    context_len: int
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("family", self.family, ("llama",))
        for name in (
            "num_layers", "model_dim", "ffw_dim", "num_heads", "num_kv_heads",
            "head_dim", "vocab_size", "context_len",
        ):  # fmt: skip
            check_int(name, getattr(self, name), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        check_range("rope_base", self.rope_base, 1.0)
        check_range("norm_eps", self.norm_eps, 0.0, 1.0)
        check_choice("tie_embeddings", self.tie_embeddings, (True, False))
        if isinstance(self.rope_scaling, Mapping):
            scaling = RopeScaling.from_mapping(self.rope_scaling)
            object.__setattr__(self, "rope_scaling", scaling)
        if self.bos_id is not None:
            check_int("bos_id", self.bos_id, 0, self.vocab_size - 1)
        check_tuple("stop_ids", self.stop_ids)
        for token_id in self.stop_ids:
            check_int("stop_ids", token_id, 0, self.vocab_size - 1)

    @property
    def group_size(self) -> int:
        """G, query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    def to_mapping(self) -> dict[str, Any]:
        """JSON-ready inverse of `from_mapping`."""
        return dataclasses.asdict(self)
