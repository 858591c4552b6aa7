"""How one request is sampled. Names and meanings are vLLM's. Host side, no jax."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

# Below this a temperature would overflow the logits; 0 says greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_INT32 = 2**31 - 1
MAX_COMPLETIONS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; every value is checked when built.

    Attributes:
      n: completions of the prompt, each with a seed of its own.
      temperature: 0 is greedy, else in [0.01, 100].
      top_p: mass of the nucleus in (0, 1]; 1 is off.
      top_k: likeliest tokens kept; 0 or -1 is off.
      seed: any integer of 64 bits; None draws one, which the output reports.
      max_tokens: most tokens to generate; None takes what the context leaves.
      ignore_eos: do not stop at the model's end tokens.
      stop: text that ends the request; a str or a list of them.
      stop_token_ids: further ids that end the request; they stay in `token_ids`.
      include_stop_str_in_output: keep in the text what ended it, string or token.
      min_tokens: tokens before which neither a stop string nor a stop id ends it.
      logprobs: log-probabilities of this many likeliest tokens per step, besides the
        sampled one, of the raw logits (before temperature and filters).
      detokenize: produce text.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      ValueError: a value out of its range; it names the field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            self._store(name, _number(name, getattr(self, name)))
        t, low, high = self.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE
        if t != 0 and not low <= t <= high:
            raise ValueError(f"temperature must be 0 or in [{low}, {high}], got {t}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        self._store("top_k", _whole("top_k", self.top_k, -1, MAX_INT32))
        self._store("n", _whole("n", self.n, 1, MAX_COMPLETIONS))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 with temperature 0, which gives equal ones, got {self.n}"
            )
        for name, least, most in (
            ("seed", -(2**63), 2**64 - 1),
            ("max_tokens", 1, MAX_INT32),
            ("logprobs", 0, MAX_INT32),
        ):
            value = getattr(self, name)
            if value is not None:
                self._store(name, _whole(name, value, least, most))
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise ValueError(f"stop_token_ids must be a list of ids, got {ids!r}")
        checked = tuple(_whole("stop_token_ids", item, 0, MAX_INT32) for item in ids)
        self._store("stop_token_ids", checked)
        self._store("stop", _strings("stop", self.stop))
        self._store("min_tokens", _whole("min_tokens", self.min_tokens, 0, MAX_INT32))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens {self.max_tokens}, "
                f"got {self.min_tokens}"
            )
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens",
            "include_stop_str_in_output",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize True: it looks at the text")

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    """One string or several as a tuple; none may be empty."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} must be a string or a list of them, got {value!r}")
    if "" in value:
        raise ValueError(f"{name} must hold no empty string, got {list(value)!r}")
    return tuple(value)


def _number(name: str, value: object) -> float:
    """A finite number as a plain float; numpy's are welcome, bool is not."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _whole(name: str, value: object, low: int, high: int) -> int:
    """A whole number in [low, high] as a plain int; numpy's are welcome."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
    return int(value)
