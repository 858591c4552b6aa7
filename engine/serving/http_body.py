"""What a body of `POST /v1/completions` or `/v1/chat/completions` asks of a server.

What sampling and prompts mean is openai_format.py's, which offline jobs share; here is
what only a server knows: which model, whether to stream, several prompts in one call.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.openai_format import (
    num_top_logprobs,
    prompt_of_body,
    sampling_of_body,
)
from headrace.engine.structured_params import shown

MAX_PROMPTS = 128
"""Prompts of one completions call; each is a request of its own to the limits."""

# `include_obfuscation` pads chunks against those who watch their lengths: no token
# changes by it, and it is not done.
_STREAM_OPTIONS = (
    "continuous_usage_stats",
    "include_obfuscation",
    "include_usage",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A checked body.

    Attributes:
      prompts: of each request `{"messages": ...}` or `{"prompt": text or ids}`, as
        `Call` takes them.
      params: of every one.
      is_stream: whether pieces are wanted as they come.
      has_usage: a last chunk tells the tokens.
      has_running_usage: every chunk does.
    """

    is_chat: bool
    prompts: list[dict[str, Any]]
    params: SamplingParams
    is_stream: bool
    has_usage: bool
    has_running_usage: bool

    @property
    def num_top(self) -> int:
        """Likeliest tokens listed per place."""
        return num_top_logprobs(self.params)


def read_ask(body: Mapping[str, Any], *, is_chat: bool, model_name: str) -> Ask:
    """Checks a body.

    Args:
      body: parsed JSON.
      is_chat: by which route it came.
      model_name: the one that is served.

    Raises:
      ServiceError: not_found for another model; invalid_argument for all else.
    """
    _check_model(body, model_name)
    try:
        options = _stream_options(body)
        params = sampling_of_body(body, is_chat=is_chat)
        prompts = (
            [{"messages": prompt_of_body(body, is_chat=True)}]
            if is_chat
            else [_prompt(one) for one in _split(body.get("prompt"))]
        )
    except ValueError as error:
        raise ServiceError("invalid_argument", str(error)) from None
    is_stream = body.get("stream") is True
    return Ask(
        is_chat=is_chat,
        prompts=prompts,
        params=params,
        is_stream=is_stream,
        has_usage=options.get("include_usage") is True,
        has_running_usage=options.get("continuous_usage_stats") is True,
    )


def _check_model(body: Mapping[str, Any], model_name: str) -> None:
    model = body.get("model")
    if not isinstance(model, str):
        raise ServiceError(
            "invalid_argument", f"model must be a string, got {shown(model)}"
        )
    if model != model_name:
        raise ServiceError(
            "not_found", f"model {shown(model)} is not served, {model_name!r} is"
        )


def _stream_options(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """`stream_options`, empty where there are none; `stream` is checked, too."""
    if not isinstance(body.get("stream"), bool | None):
        raise ValueError(f"stream must be true or false, got {shown(body['stream'])}")
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ValueError(f"stream_options must be an object, got {shown(options)}")
    if not body.get("stream"):
        raise ValueError("stream_options needs stream true")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            raise ValueError(
                f"stream_options has the fields {_STREAM_OPTIONS}, got {shown(name)}"
            )
        if not isinstance(value, bool | None):
            raise ValueError(
                f"stream_options.{name} must be true or false, got {shown(value)}"
            )
    return options


def _split(prompt: Any) -> list[Any]:
    """The prompts of a completions call: one text or list of ids, or a list of them."""
    is_several = isinstance(prompt, list) and any(
        isinstance(one, str | list) for one in prompt
    )
    if not is_several:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise ValueError(
            f"prompt must be at most {MAX_PROMPTS} prompts, got {len(prompt)}"
        )
    return prompt


def _prompt(prompt: Any) -> dict[str, Any]:
    """One prompt as `Call` takes it."""
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        raise ValueError("prompt must not be nested deeper than a list of lists")
    found = prompt_of_body({"prompt": prompt}, is_chat=False)
    return {"prompt": found.get("prompt", found.get("prompt_token_ids"))}


def param_of(message: str, body: Mapping[str, Any]) -> str | None:
    """The field of `body` that an error's message is about; None where it names none.

    Messages begin with the field's name; "messages[3].role" is of the field messages.
    """
    name = re.match(r"[a-z_]+", message)
    return name[0] if name is not None and name[0] in body else None
