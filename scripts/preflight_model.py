"""What preflight knows of a target, and its floors of time: a model, not a measurement.

A floor is bytes over the vendor's bandwidth, or products over the vendor's rate,
whichever takes longer; nothing runs as fast. Imports no jax.
"""

import dataclasses
import math
import os
import re

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.memory_sizes import token_bytes
from headrace.engine.sizing import DeviceFacts
from headrace.engine.weight_sizes import parameter_bytes, weights_bytes
from headrace.scripts import gpu_compile

# Dense bfloat16 products a second, without sparsity. Source: NVIDIA's datasheets.
DENSE_FLOPS = {
    "a100_80gb": 312e12,
    "b200": 2250e12,
    "h100_sxm": 989e12,
    "h200_sxm": 989e12,
}
# XLA reserves this share of a card when it starts.
_XLA_SHARE = 0.75
_XLA_VARIABLES = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def full_target_name(name: str) -> str:
    """The file of configs/gpu_targets/ that a name means: its own, or how it begins.

    Raises:
      ValueError: none or several begin so; the names are listed.
    """
    names = gpu_compile.target_names()
    found = [known for known in names if known.startswith(name)] if name else []
    if name in names or len(found) == 1:
        return name if name in names else found[0]
    raise ValueError(f"target {name!r} is not one of 'cpu' or {names}, and no one's")


def gpu_facts(target: gpu_compile.Target) -> DeviceFacts:
    """What sizing would be told on that GPU, by a process that has it to itself.

    XLA's share of the card is free; it is three quarters, unless the environment says
    otherwise, as it would there. The host is taken to have room for preempted requests.

    Raises:
      ValueError: XLA's environment variable holds no share.
    """
    memory = re.search(r"device_memory_size: (\d+)", target.text)
    assert memory is not None
    text = next((os.environ[v] for v in _XLA_VARIABLES if os.environ.get(v)), "")
    share = float(text) if text else _XLA_SHARE
    if not 0 < share <= 1:
        raise ValueError(f"{_XLA_VARIABLES[0]} must be a share in (0, 1], got {text}")
    free_bytes = int(int(memory[1]) * share)
    return DeviceFacts(
        platform="gpu",
        free_bytes=free_bytes,
        host_free_bytes=4 * free_bytes,
        capability=target.capability,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floors:
    """Least bytes and products of steps, and the least time that they take.

    Attributes:
      model: its shapes.
      config: resolved.
      bytes_per_s: the target's bandwidth; None where no vendor's figure is known.
      flops_per_s: its dense products; None likewise.
    """

    model: ModelConfig
    config: EngineConfig
    bytes_per_s: float | None
    flops_per_s: float | None

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token."""
        return token_bytes(self.model, self.config)

    def weight_bytes(self, tokens: int) -> int:
        """Weights that a forward of so many tokens reads, each once.

        Of an input table that is not the head too, only the tokens' rows.
        """
        D, V = self.model.model_dim, self.model.vocab_size

        def table(rows: int) -> int:
            return parameter_bytes("embedding", (rows, D), self.config)

        unread = 0 if self.model.tie_embeddings else table(V)
        return weights_bytes(self.model, self.config) - unread + table(tokens)

    def decode_ms(self, rows: int, context: int) -> float | None:
        """ITL: a decode step of `rows` requests that hold `context` tokens each."""
        flops = rows * (self._flops_of_token + self._flops_of_head)
        flops += rows * context * self._flops_of_pair
        moved = self.weight_bytes(rows) + rows * context * self.token_bytes
        return self._ms(moved, flops)

    def prefill_ms(self, rows: int, tokens: int, start: int = 0) -> float | None:
        """A prefill call over chunks of `tokens` that follow `start` earlier ones.

        The head sees one token of each row.
        """
        pairs = tokens * start + tokens * tokens / 2
        flops = tokens * self._flops_of_token + pairs * self._flops_of_pair
        flops += self._flops_of_head
        moved = self.weight_bytes(rows * tokens)
        moved += rows * (start + tokens) * self.token_bytes
        return self._ms(moved, rows * flops)

    def prompt_ms(self, tokens: int) -> float | None:
        """TTFT: a prompt by itself, in chunks of the largest shape."""
        chunk = max(tokens for _, tokens in self.config.prefill_shapes or ())
        times = [
            self.prefill_ms(1, min(chunk, tokens - start), start)
            for start in range(0, tokens, chunk)
        ]
        known = [time for time in times if time is not None]
        return math.fsum(known) if len(known) == len(times) else None

    @property
    def _flops_of_token(self) -> int:
        """Products of a token with the weights of all layers; two for each."""
        m = self.model
        heads = 2 * m.num_heads + 2 * m.num_kv_heads
        layer = heads * m.head_dim * m.model_dim + 3 * m.ffw_dim * m.model_dim
        return 2 * m.num_layers * layer

    @property
    def _flops_of_pair(self) -> int:
        """Of a query token and a key token, in all layers: scores, and values."""
        return 4 * self.model.num_layers * self.model.num_heads * self.model.head_dim

    @property
    def _flops_of_head(self) -> int:
        return 2 * self.model.vocab_size * self.model.model_dim

    def _ms(self, moved_bytes: float, flops: float) -> float | None:
        if self.bytes_per_s is None or self.flops_per_s is None:
            return None
        return 1e3 * max(moved_bytes / self.bytes_per_s, flops / self.flops_per_s)
