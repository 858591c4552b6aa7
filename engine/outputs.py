"""What a request gives back. Names and shapes are vLLM's. Host side, no jax."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "deadline", "rejected", "error"]
# By whether it was the time in the queue.
TIME_OVER = {
    False: "its deadline_s is over",
    True: "it waited longer than its queue_timeout_s",
}
NOTHING_ALLOWED = (
    "no token may come next: logit_bias, allowed_token_ids, bad_words, min_tokens and "
    "structured_outputs together forbid all of them"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of one token.

    Attributes:
      logprob: of the raw logits, before temperature and filters.
      rank: 1 is the likeliest token; None where it was not asked.
      decoded_token: its text, None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """When a request's life happened: seconds of `time.perf_counter`."""

    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int


@dataclasses.dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
      finish_reason: "stop", "length", "cancelled", "deadline" (its time is over, with
        what it has), "rejected" (it waited too long to begin) or "error"; None while
        it runs.
      finish_message: what `finish_reason` leaves open.
      stop_reason: the string of `stop` or the id of `stop_token_ids` that ended it.
      seed: reproduces this completion.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    finish_message: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclasses.dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request's completions so far.

    Attributes:
      prompt_logprobs: per prompt token, None for the first; where asked.
      error: why the request could not run; its finish_reason is then "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
