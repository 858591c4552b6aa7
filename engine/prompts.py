"""What users pass to generate and chat, brought into one shape. Host side, no jax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.sampling_params import SamplingParams

Message = Mapping[str, Any]


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
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [as_prompt(prompts)]
    if isinstance(prompts, Sequence):
        return [as_prompt(prompt) for prompt in prompts]
    raise ValueError(_forms(prompts))


def as_prompt(prompt: Any) -> Prompt:
    """One str, list of ids, {"prompt": str} or {"prompt_token_ids": [ids]}."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return Prompt(token_ids=prompt)
    if hasattr(prompt, "tolist"):  # a numpy array of ids
        return Prompt(token_ids=prompt.tolist())
    raise ValueError(_forms(prompt))


def _from_mapping(prompt: Mapping[str, Any]) -> Prompt:
    known = {"prompt", "prompt_token_ids"}
    if set(prompt) - known or not set(prompt) & known:
        raise ValueError(
            f"a prompt mapping has the keys 'prompt' or 'prompt_token_ids', got "
            f"{sorted(prompt)}"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"'prompt' must be a str, got {type(text).__name__}")
    if ids is None and text is None:
        raise ValueError("a prompt mapping needs a value, got None")
    return Prompt(text=text, token_ids=ids)


def _is_ids(value: Any) -> bool:
    """A non-empty flat sequence of numbers is one prompt, not many."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(item, int) or hasattr(item, "__index__") for item in value)
    )


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
      ValueError: a list of another length than the prompts.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    params = list(params)
    if len(params) != count:
        raise ValueError(
            f"sampling_params must be one or one per prompt: {count} prompts, "
            f"{len(params)} params"
        )
    return params


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
