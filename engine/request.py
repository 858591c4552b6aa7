"""One request on its way through the engine. Host side, no jax, no text.

new_request.py makes it; the scheduler owns and changes it from then on; others only
read it.
"""

import dataclasses
import enum

from headrace.engine.outputs import FinishReason
from headrace.engine.prefix_hash import PageName
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured import GrammarState

# Token id to (log-probability, rank), the sampled token first.
TokenLogprobs = dict[int, tuple[float, int | None]]
# Tokens of the longest text that `bad_words` can forbid.
MAX_BAD_WORD_LEN = 8


class RequestStatus(enum.Enum):
    """Where a request is. Preemption alone moves it back."""

    WAITING = "waiting"  # in the queue: no slot, no pages
    PREFILLING = "prefilling"  # part of its prompt was not dispatched yet
    DECODING = "decoding"  # all of its prompt was
    PREEMPTED = "preempted"  # in the queue again, after it had begun to decode
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """A checked request and its progress; owned by the scheduler.

    Attributes:
      max_tokens, seed, stop_ids: resolved from `params` and the model.
      bad_ids: token sequences that spell what `params.bad_words` forbids.
      grammar: what the output must match from here on; None is anything.
      prompt_logprobs: a place per prompt token where `params.prompt_logprobs` is set,
        filled as the chunks run; one list for all siblings.
      arrival_s, admitted_s, first_token_s, finished_s: seconds of the engine's clock.
      priority: lower runs first, under the policy "priority".
      tenant: who shares pages and a fair share with whom.
      uses_cache: may take pages that other requests filled.
      deadline_s, queue_deadline_s: when it ends with what it has; when it ends if it
        has not begun.
      name_seed, page_names: where the names of its pages start, and those of its full
        pages so far, see prefix_hash.
      index: place among the completions of its prompt.
      leader: the sibling whose prefill it shares while both are on their way, for
        completions after the first.
      followers: siblings that hold slots and wait for its last chunk.
      number: in order of arrival, given by the scheduler.
      slot: row of the decode batch while it runs; the last one afterwards.
      pages: KV pages that it holds, in order of position.
      host_pages: where a preempted request's pages wait.
      fill_len: tokens to prefill: the prompt, and after a preemption that recomputes
        the output so far.
      num_prefilled: of those, dispatched to the device or found in the cache.
      num_cached: prompt tokens found in the cache when it was admitted first.
      num_dispatched: output tokens asked of the device, those not yet read included.
      output_token_ids: what the host has read.
      output_logprobs, cumulative_logprob: filled if `params.logprobs` is set.
      stop_reason: the string of `params.stop` or the id of `params.stop_token_ids`
        that ended it.
      finish_message: why it ended, where `finish_reason` does not say it all.
      is_metered: the metrics know that it began.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarState | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt: str | None = None
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str | None = None
    uses_cache: bool = True
    deadline_s: float | None = None
    queue_deadline_s: float | None = None
    name_seed: PageName = b""
    page_names: tuple[PageName, ...] = ()
    index: int = 0
    leader: "Request | None" = None
    followers: list["Request"] = dataclasses.field(default_factory=list)
    number: int = -1
    status: RequestStatus = RequestStatus.WAITING
    slot: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    host_pages: list[int] = dataclasses.field(default_factory=list)
    fill_len: int = 0
    num_prefilled: int = 0
    num_cached: int = 0
    admitted_s: float | None = None
    num_dispatched: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    finish_message: str | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    is_metered: bool = False

    def __post_init__(self) -> None:
        self.fill_len = self.fill_len or self.prompt_len

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def max_len(self) -> int:
        """Most tokens it can ever hold, prompt and output together."""
        return self.prompt_len + self.max_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in pages once all is dispatched."""
        return self.prompt_len + max(0, self.num_dispatched - 1)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of prompt and output together."""
        if end <= self.prompt_len:
            return self.prompt_token_ids[start:end]
        outputs = self.output_token_ids[
            max(0, start - self.prompt_len) : end - self.prompt_len
        ]
        return (*self.prompt_token_ids[start:], *outputs)

    @property
    def is_finished(self) -> bool:
        """No further token will come."""
        return self.status is RequestStatus.FINISHED
