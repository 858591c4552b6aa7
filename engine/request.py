"""One request on its way through the engine. Host side, no jax, no text.

All of a request's limits are checked here, before it reaches the scheduler, which
owns and changes it from then on; others only read it.
"""

import dataclasses
import enum
import hashlib
import operator
import secrets
import time
from collections.abc import Iterable
from typing import Any

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.outputs import FinishReason
from headrace.engine.prefix_hash import PageName
from headrace.engine.sampling_params import SamplingParams

# Token id to (log-probability, rank), the sampled token first.
TokenLogprobs = dict[int, tuple[float, int | None]]


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
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
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
    first_token_s: float | None = None
    finished_s: float | None = None

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


def make_request(
    request_id: str,
    prompt_token_ids: Iterable[Any],
    params: SamplingParams,
    *,
    prompt: str | None = None,
    model_config: ModelConfig,
    engine_config: EngineConfig,
    arrival_s: float | None = None,
    seed: int | None = None,
) -> Request:
    """Checks a request against the model and the engine, and resolves its defaults.

    Args:
      request_id: unique among live requests.
      prompt_token_ids: whole numbers in [0, vocab_size); numpy's are welcome.
      params: the user's.
      prompt: text behind the ids; carried for the output only.
      model_config: gives vocabulary and stop ids.
      engine_config: resolved; gives the limits.
      arrival_s: seconds of the engine's clock; None is now, by `time.perf_counter`.
      seed: in place of the user's; None draws one where the user gave none.

    Raises:
      ValueError: an empty prompt, an id out of the vocabulary, more tokens than the
        context or the page pool holds, or more stop ids or log-probabilities than
        the engine was built for.
    """
    ids = _checked_ids("prompt_token_ids", prompt_token_ids, model_config.vocab_size)
    if not ids:
        raise ValueError("the prompt must have at least 1 token, got 0")
    max_tokens = _resolve_max_tokens(len(ids), params.max_tokens, engine_config)
    stop_ids = _resolve_stop_ids(params, model_config, engine_config.max_stop_ids)
    _check_vocabulary(params, stop_ids, model_config.vocab_size)
    limit = engine_config.max_logprobs
    if params.logprobs is not None and params.logprobs > limit:
        raise ValueError(
            f"logprobs must be at most max_logprobs {limit}, got {params.logprobs}"
        )
    if seed is None:
        seed = secrets.randbits(63) if params.seed is None else params.seed
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=stop_ids,
        prompt=prompt,
        arrival_s=time.perf_counter() if arrival_s is None else arrival_s,
    )


def _check_vocabulary(
    params: SamplingParams, stop_ids: tuple[int, ...], vocab_size: int
) -> None:
    """Whether ids exist, and something can be sampled at every step."""
    _checked_ids("logit_bias", params.logit_bias or (), vocab_size)
    if params.allowed_token_ids is None:
        return
    allowed = set(
        _checked_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    )
    if params.min_tokens and allowed <= set(stop_ids):
        raise ValueError(
            "allowed_token_ids must hold an id that does not end the request, for "
            f"min_tokens {params.min_tokens}, got {sorted(allowed)}"
        )


def make_siblings(first: Request) -> list[Request]:
    """All completions of a checked request: itself, and those that `n` asks for.

    Each has a seed that follows from the first one's, which reproduces it alone.
    """
    others = [
        dataclasses.replace(
            first,
            request_id=f"{first.request_id}-{index}",
            seed=_sibling_seed(first.seed, index),
            index=index,
            leader=first,
            pages=[],
            host_pages=[],
            followers=[],
            output_token_ids=[],
            output_logprobs=[],
        )
        for index in range(1, first.params.n)
    ]
    return [first, *others]


def _sibling_seed(seed: int, index: int) -> int:
    """63 bits; different for every index."""
    data = f"{seed}:{index}".encode()
    digest = hashlib.blake2b(data, digest_size=8, person=b"headrace-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def _checked_ids(name: str, ids: Iterable[Any], vocab_size: int) -> tuple[int, ...]:
    """The ids as plain ints in [0, vocab_size)."""
    try:
        ids = iter(ids)
    except TypeError:
        raise ValueError(f"{name} must be a list of token ids, got {ids!r}") from None
    checked = []
    for place, item in enumerate(ids):
        try:
            token_id = operator.index(item)
        except TypeError:
            token_id = -1
        if isinstance(item, bool) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} must be whole numbers in [0, {vocab_size - 1}], got {item!r} "
                f"at place {place}"
            )
        checked.append(token_id)
    return tuple(checked)


def _resolve_max_tokens(
    prompt_len: int, max_tokens: int | None, config: EngineConfig
) -> int:
    """Most tokens to generate, such that context and pool can hold the request."""
    assert config.max_context_len is not None and config.num_pages is not None
    # A pool smaller than the context bounds a request, too; page 0 is the dummy.
    pool_len = (config.num_pages - 1) * config.page_size
    limit, reason = min(
        (config.max_context_len, "max_context_len"),
        (pool_len, f"all {config.num_pages - 1} pages of {config.page_size}"),
    )
    if prompt_len > limit - 1:
        raise ValueError(
            f"the prompt must have at most {limit - 1} tokens, to leave room for one "
            f"of output in {limit} ({reason}), got {prompt_len}"
        )
    room = limit - prompt_len
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ValueError(
            f"max_tokens must be at most {room} after {prompt_len} prompt tokens, to "
            f"stay within {limit} ({reason}), got {max_tokens}"
        )
    return max_tokens


def _resolve_stop_ids(
    params: SamplingParams, model_config: ModelConfig, max_stop_ids: int
) -> tuple[int, ...]:
    """The model's stop ids (unless ignored), then the user's, without repeats."""
    user = _checked_ids(
        "stop_token_ids", params.stop_token_ids or (), model_config.vocab_size
    )
    own = () if params.ignore_eos else model_config.stop_ids
    stop_ids = tuple(dict.fromkeys((*own, *user)))
    if len(stop_ids) > max_stop_ids:
        raise ValueError(
            f"stop_token_ids and the model's own {len(own)} together must be at most "
            f"max_stop_ids {max_stop_ids}, got {len(stop_ids)}"
        )
    return stop_ids
