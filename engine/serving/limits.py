"""What a request may ask of a service at most; checked before any device work."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.errors import ServiceError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Bounds of one request, besides the engine's own.

    Attributes:
      max_prompt_tokens: after tokenizing; None is what the engine holds.
      max_prompt_chars: of a text, or of all messages of a conversation together.
      max_messages: of a conversation.
      max_tokens: that a request may ask for; None is what the engine holds.
      max_n: completions of a prompt.
      max_logprobs: per token; None is the engine's `max_logprobs`.
      max_stop_strings, max_stop_chars: their number, and the length of each.
      max_bias_entries: of `logit_bias`, and ids of `allowed_token_ids`.
      max_grammar_chars: of a schema, regex, choice or grammar.
      max_deadline_s: that a request may ask for.

    Raises:
      ValueError: a bound under 1.
    """

    max_prompt_tokens: int | None = None
    max_prompt_chars: int = 4_000_000
    max_messages: int = 1024
    max_tokens: int | None = None
    max_n: int = 16
    max_logprobs: int | None = None
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_bias_entries: int = 1024
    max_grammar_chars: int = 100_000
    max_deadline_s: float = 3600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")

    def check_params(self, params: SamplingParams) -> None:
        """Raises ServiceError invalid_argument where `params` asks for too much."""
        stops = [params.stop] if isinstance(params.stop, str) else params.stop or ()
        grammar = params.structured_outputs
        chars = getattr(grammar, "num_chars", 0)
        biases = len(params.logit_bias or ())
        counts: list[tuple[str, int | None, int | None]] = [
            ("n", params.n, self.max_n),
            ("max_tokens", params.max_tokens, self.max_tokens),
            ("logprobs", params.logprobs, self.max_logprobs),
            ("prompt_logprobs", params.prompt_logprobs, self.max_logprobs),
            ("number of stop strings", len(stops), self.max_stop_strings),
            ("length of a stop string", _longest(stops), self.max_stop_chars),
            ("entries of logit_bias", biases, self.max_bias_entries),
            (
                "number of allowed_token_ids",
                len(params.allowed_token_ids or ()),
                self.max_bias_entries,
            ),
            ("characters of structured_outputs", chars, self.max_grammar_chars),
        ]
        for name, value, most in counts:
            check_at_most(name, value, most)
        if params.logprobs == -1 and self.max_logprobs is not None:
            raise ServiceError(
                "invalid_argument",
                f"logprobs must be in [0, {self.max_logprobs}], got -1",
            )

    def check_times(
        self, deadline_s: float | None, queue_timeout_s: float | None
    ) -> None:
        """Raises ServiceError invalid_argument for a time out of its range."""
        times = {"deadline_s": deadline_s, "queue_timeout_s": queue_timeout_s}
        for name, value in times.items():
            if value is not None and not 0 < value <= self.max_deadline_s:
                raise ServiceError(
                    "invalid_argument",
                    f"{name} must be in (0, {self.max_deadline_s:g}], got {value:g}",
                )

    def check_text(self, text: str) -> None:
        """Raises ServiceError invalid_argument for a text that is too long."""
        check_at_most("characters of the prompt", len(text), self.max_prompt_chars)

    def check_messages(self, messages: Any) -> None:
        """Raises ServiceError invalid_argument for a conversation that is too long."""
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ServiceError("invalid_argument", "messages must be a list")
        check_at_most("number of messages", len(messages), self.max_messages)
        texts = [m.get("content") for m in messages if isinstance(m, Mapping)]
        chars = sum(len(text) for text in texts if isinstance(text, str))
        check_at_most("characters of messages", chars, self.max_prompt_chars)


def check_at_most(name: str, value: float | None, most: float | None) -> None:
    """Raises ServiceError invalid_argument where there is a bound and it is passed."""
    if value is not None and most is not None and value > most:
        raise ServiceError(
            "invalid_argument", f"{name} must be at most {most}, got {value}"
        )


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)
