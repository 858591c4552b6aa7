"""How one request is sampled. Names and meanings are vLLM's. Host side, no jax."""

import dataclasses
import functools
import math
import numbers
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.engine.structured_params import StructuredOutputsParams

# Each can serve what the ones before it can.
SampleVariant = Literal["greedy", "sampled", "full"]
OutputKind = Literal["delta", "cumulative", "final_only"]

# Below this a temperature would overflow the logits; 0 says greedy.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MAX_INT32 = 2**31 - 1
MAX_COMPLETIONS = 16384
# The likeliest tokens that a step finds on the device; more take the whole row.
TOP_ON_DEVICE = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request; every value is checked when built.

    Attributes:
      n: completions of the prompt, each with a seed of its own.
      presence_penalty, frequency_penalty: in [-2, 2], taken off the logits of tokens
        that the output has, once and per occurrence; 0 is off.
      repetition_penalty: in [0.01, 100], divides (or multiplies, below 0) the logits
        of tokens that prompt or output have; 1 is off.
      temperature: 0 is greedy, else in [0.01, 100].
      top_p: mass of the nucleus in (0, 1]; 1 is off.
      top_k: likeliest tokens kept; 0 or -1 is off.
      min_p: least probability kept, as a part of the likeliest's, in [0, 1]; 0, and
        what is below float32's normal numbers, is off.
      seed: any integer of 64 bits; None draws one, which the output reports.
      max_tokens: most tokens to generate; None takes what the context leaves.
      ignore_eos: do not stop at the model's end tokens.
      stop: text that ends the request; a str or a list of them.
      stop_token_ids: further ids that end the request; they stay in `token_ids`.
      include_stop_str_in_output: keep in the text what ended it, string or token.
      min_tokens: tokens before which neither a stop string nor a stop id ends it. With
        `structured_outputs` it ends before them where nothing else can follow.
      logprobs: log-probabilities of this many likeliest tokens per step, besides the
        sampled one, of the raw logits (before temperature, filters and all else); -1
        is the whole vocabulary.
      prompt_logprobs: likewise for every token of the prompt but the first.
      logit_bias: token id to a number in [-100, 100] added to its logit.
      allowed_token_ids: only these can be sampled; None allows all.
      bad_words: texts that the output will not have, as the tokens that spell them, at
        its beginning or after a space.
      structured_outputs: what the whole output must match, see
        StructuredOutputsParams; a mapping of its fields does as well.
      detokenize: produce text.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: byte-level and SentencePiece tokenizers put none
        there either way; with one that does, False is refused.
      output_kind: what a stream yields: "delta" (what came since the last one),
        "cumulative" (all so far) or "final_only". `generate` returns the whole anyway.

    Raises:
      ValueError: a value out of its range; it names the field, value and range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = "delta"

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            self._store(name, _number(name, getattr(self, name)))
        for name, least, most in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("repetition_penalty", 0.01, 100.0),
            ("min_p", 0.0, 1.0),
        ):
            number = _number(name, getattr(self, name))
            if not least <= number <= most:
                raise ValueError(f"{name} must be in [{least}, {most}], got {number}")
            self._store(name, number)
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
            ("logprobs", -1, MAX_INT32),
            ("prompt_logprobs", 0, MAX_INT32),
        ):
            value = getattr(self, name)
            if value is not None:
                self._store(name, _whole(name, value, least, most))
        stop_ids = self.stop_token_ids
        stop_ids = () if stop_ids is None else _ids("stop_token_ids", stop_ids)
        self._store("stop_token_ids", stop_ids)
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError(
                    "allowed_token_ids must hold at least one id, got none"
                )
            self._store("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._store("logit_bias", _biases(self.logit_bias))
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            self._store(name, () if texts is None else _strings(name, texts))
        self._store("min_tokens", _whole("min_tokens", self.min_tokens, 0, MAX_INT32))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens {self.max_tokens}, "
                f"got {self.min_tokens}"
            )
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens",
            "include_stop_str_in_output", "spaces_between_special_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize True: it looks at the text")
        kinds = typing.get_args(OutputKind)
        if self.output_kind not in kinds:
            raise ValueError(f"output_kind must be in {kinds}, got {self.output_kind}")
        self._store("structured_outputs", _structured(self.structured_outputs))

    @functools.cached_property
    def has_extras(self) -> bool:
        """Whether the logits are processed before temperature and filters."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return bool(
            any(penalties)
            or self.repetition_penalty != 1
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.structured_outputs is not None
        )

    @functools.cached_property
    def variant(self) -> SampleVariant:
        """The cheapest sample variant that can serve it."""
        if self.logprobs is not None or self.has_extras:
            return "full"
        return "sampled" if self.temperature > 0 else "greedy"

    @functools.cached_property
    def wants_logits(self) -> bool:
        """Whether the host needs the whole row of logits for its log-probabilities."""
        count = self.logprobs
        return count is not None and (count == -1 or count > TOP_ON_DEVICE)

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def num_top(max_logprobs: int) -> int:
    """The likeliest tokens that programs find, for an engine's `max_logprobs`."""
    return TOP_ON_DEVICE if max_logprobs == -1 else min(max_logprobs, TOP_ON_DEVICE)


def _structured(value: object) -> StructuredOutputsParams | None:
    """What the output must match, from a mapping too."""
    if not isinstance(value, Mapping):
        if not isinstance(value, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs must be StructuredOutputsParams, got {value!r}"
            )
        return value
    known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
    if unknown := sorted(set(map(str, value)) - set(known)):
        raise ValueError(f"structured_outputs must have keys of {known}, got {unknown}")
    return StructuredOutputsParams(**value)


def _ids(name: str, value: object) -> tuple[int, ...]:
    """A list of token ids as a tuple of plain ints; the vocabulary is checked later."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a list of ids, got {value!r}")
    return tuple(_whole(name, item, 0, MAX_INT32) for item in value)


def _biases(value: object) -> dict[int, float]:
    """A mapping of token ids to numbers, as plain ones; JSON has its ids as text."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map ids to numbers, got {value!r}")
    checked: dict[int, float] = {}
    for token_id, bias in value.items():
        if isinstance(token_id, str) and token_id.isdecimal():
            token_id = int(token_id)
        if token_id in checked:
            raise ValueError(f"logit_bias must name an id once, got {token_id} again")
        number = _number("logit_bias", bias)
        if not -100 <= number <= 100:
            raise ValueError(f"logit_bias must be in [-100, 100], got {number}")
        checked[_whole("logit_bias", token_id, 0, MAX_INT32)] = number
    return checked


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
