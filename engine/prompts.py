"""What users pass to generate and chat, brought into one shape. Host side, no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.sampling_params import SamplingParams

Message = Mapping[str, Any]
ParamsLike = SamplingParams | Sequence[SamplingParams] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: text, token ids, or rendered chat text."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    is_chat: bool = False


def as_prompts(prompts: Any) -> list[Prompt]:
    """Accepts a str, a list of ids, a mapping, or a list of any of these.

    Raises:
      ValueError: something else; the value's type and the known forms are named.
    """
    accepted = []
    for item in as_prompts_or_errors(prompts):
        if isinstance(item, ValueError):
            raise item
        accepted.append(item)
    return accepted


def as_prompts_or_errors(prompts: Any) -> list[Prompt | ValueError]:
    """Like `as_prompts`, but a wrong item of a list is its ValueError in the result.

    Raises:
      ValueError: neither a prompt nor a list, or the only prompt is wrong.
    """
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [as_prompt(prompts)]
    if _is_list(prompts):
        return [as_prompt_or_error(prompt) for prompt in prompts]
    raise ValueError(_forms(prompts))


def as_prompt_or_error(prompt: Any) -> Prompt | ValueError:
    """Like `as_prompt`; what it would raise is returned."""
    try:
        return as_prompt(prompt)
    except ValueError as error:
        return error


def as_prompt(prompt: Any) -> Prompt:
    """One str, list of ids, {"prompt": str} or {"prompt_token_ids": [ids]}.

    Raises:
      ValueError: something else. The ids themselves are not looked at.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    ids = _plain(prompt)
    if _is_list(ids):
        return Prompt(token_ids=ids)
    raise ValueError(_forms(prompt))


def _from_mapping(prompt: Mapping[str, Any]) -> Prompt:
    known = {"prompt", "prompt_token_ids"}
    if set(prompt) - known or not set(prompt) & known:
        raise ValueError(
            f"a prompt mapping has the keys 'prompt' or 'prompt_token_ids', got "
            f"{list(prompt)}"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'prompt' must be a str, got {type(text).__name__}")
    if ids is None and text is None:
        raise ValueError("a prompt mapping needs a value, got None")
    ids = _plain(ids)
    if ids is not None and not _is_list(ids):
        raise ValueError(
            f"'prompt_token_ids' must be a list of token ids, got {ids!r:.80}"
        )
    return Prompt(text=text, token_ids=ids)


def _plain(value: Any) -> Any:
    """An array, of numpy or another library, as lists of numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_list(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | bytearray)
    return isinstance(value, Sequence) and not is_text


def _is_ids(value: Any) -> bool:
    """A non-empty flat sequence of numbers is one prompt, not many."""
    value = _plain(value)
    return _is_list(value) and len(value) > 0 and all(map(_is_number, value))


def _is_number(item: Any) -> bool:
    # An array of any size has `__index__`, and is a prompt of its own.
    return hasattr(item, "__index__") and getattr(item, "ndim", 0) == 0


def _forms(value: Any) -> str:
    return (
        "a prompt is a str, a list of token ids, {'prompt': str} or "
        f"{{'prompt_token_ids': [ids]}}, got {type(value).__name__}"
    )


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One SamplingParams for all, or one for each.

    Raises:
      ValueError: something else than SamplingParams, or a list of another length
        than the prompts.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params):
        raise ValueError(
            f"sampling_params must be a SamplingParams or a list of them, got "
            f"{type(params).__name__} {params!r:.80}"
        )
    for place, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(
                f"sampling_params must hold SamplingParams only, got "
                f"{type(one).__name__} {one!r:.80} at place {place}"
            )
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one or one per prompt: {count} prompts, "
            f"{len(params)} params"
        )
    return list(params)


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation (a list of messages) or a list of them."""
    if isinstance(messages, Sequence) and messages:
        if isinstance(messages[0], Mapping):
            return [messages]
        if not isinstance(messages, str):
            return list(messages)
    raise ValueError(
        "chat takes a non-empty list of messages {'role': ..., 'content': ...}, or a "
        f"list of such lists, got {messages!r:.80}"
    )
