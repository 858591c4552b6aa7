"""Makes requests: all limits are checked and all defaults resolved here, before the
scheduler sees one. Host side, no jax, no text.
"""

import dataclasses
import hashlib
import operator
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.prefix_hash import chain_seed, name_pages
from headrace.engine.request import MAX_BAD_WORD_LEN, Request
from headrace.engine.sampling_params import SamplingParams, num_top
from headrace.engine.text_rules import TokenRules


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
    rules: TokenRules | None = None,
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
      rules: what `params` say about text; None where they say nothing.

    Raises:
      ValueError: an empty prompt, an id out of the vocabulary, more tokens than the
        context or the page pool holds, or more stop ids, log-probabilities or bad
        words than the engine was built for.
    """
    ids = _checked_ids("prompt_token_ids", prompt_token_ids, model_config.vocab_size)
    if not ids:
        raise ValueError("the prompt must have at least 1 token, got 0")
    max_tokens = _resolve_max_tokens(len(ids), params.max_tokens, engine_config)
    stop_ids = _resolve_stop_ids(params, model_config, engine_config.max_stop_ids)
    _check_vocabulary(params, stop_ids, model_config.vocab_size)
    _check_logprobs(params, engine_config)
    rules = rules or TokenRules()
    bad_ids = tuple(dict.fromkeys(rules.bad_ids))
    _check_bad_ids(bad_ids, engine_config.max_bad_words)
    if seed is None:
        seed = secrets.randbits(63) if params.seed is None else params.seed
    return Request(
        request_id=request_id,
        prompt_token_ids=ids,
        params=params,
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=stop_ids,
        bad_ids=bad_ids,
        grammar=rules.grammar,
        prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(ids),
        prompt=prompt,
        arrival_s=time.perf_counter() if arrival_s is None else arrival_s,
    )


def _check_logprobs(params: SamplingParams, config: EngineConfig) -> None:
    """Whether the engine was built to give so many."""
    asked, limit = params.logprobs, config.max_logprobs
    if asked is not None and limit >= 0 and not 0 <= asked <= limit:
        raise ValueError(
            f"logprobs must be in [0, {limit}] (max_logprobs; -1 there lifts it), "
            f"got {asked}"
        )
    asked = params.prompt_logprobs
    if asked is None:
        return
    if not config.scoring:
        raise ValueError(
            f"prompt_logprobs needs an engine with scoring=True, got {asked}"
        )
    if asked > (most := num_top(limit)):
        raise ValueError(f"prompt_logprobs must be in [0, {most}], got {asked}")


def _check_bad_ids(bad_ids: Sequence[tuple[int, ...]], max_bad_words: int) -> None:
    """Whether the device has room for them."""
    longer = [ids for ids in bad_ids if len(ids) > 1]
    if len(longer) > max_bad_words:
        raise ValueError(
            f"bad_words must be at most max_bad_words {max_bad_words} sequences of two "
            f"tokens or more, got {len(longer)}"
        )
    for ids in longer:
        if len(ids) > MAX_BAD_WORD_LEN:
            raise ValueError(
                f"bad_words must have at most {MAX_BAD_WORD_LEN} tokens each, got "
                f"{len(ids)}: {list(ids)}"
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
            grammar=first.grammar and first.grammar.copy(),
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


def longest_request(config: EngineConfig) -> tuple[int, str]:
    """Most tokens, prompt and output together, and what bounds them."""
    assert config.max_context_len is not None and config.num_pages is not None
    # A pool smaller than the context bounds a request, too; page 0 is the dummy.
    pool_len = (config.num_pages - 1) * config.page_size
    return min(
        (config.max_context_len, "max_context_len"),
        (pool_len, f"all {config.num_pages - 1} pages of {config.page_size}"),
    )


def _resolve_max_tokens(
    prompt_len: int, max_tokens: int | None, config: EngineConfig
) -> int:
    """Most tokens to generate, such that context and pool can hold the request."""
    limit, reason = longest_request(config)
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


def set_deadlines(
    request: Request, deadline_s: float | None, queue_timeout_s: float | None
) -> None:
    """Bounds a request's time.

    Args:
      request: just made.
      deadline_s: seconds from its arrival after which it ends with what it has.
      queue_timeout_s: seconds after which it ends if it has not begun.

    Raises:
      ValueError: they are not above 0.
    """
    named = {"deadline_s": deadline_s, "queue_timeout_s": queue_timeout_s}
    for name, seconds in named.items():
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name} must be above 0, got {seconds}")
    if deadline_s is not None:
        request.deadline_s = request.arrival_s + deadline_s
    if queue_timeout_s is not None:
        request.queue_deadline_s = request.arrival_s + queue_timeout_s


def name_request(request: Request, identity: str, config: EngineConfig) -> None:
    """Names the full pages of a request's prompt, under which others find them.

    Args:
      request: new, of a known tenant.
      identity: of the weights.
      config: resolved.
    """
    # One class fills all prompts in invariant mode; fast mode makes no claim.
    request.name_seed = chain_seed(
        model=identity,
        bit_class=f"filling:{config.numerics}",
        tenant=request.tenant or "",
    )
    request.page_names = name_pages(
        request.name_seed, request.prompt_token_ids, config.page_size
    )
