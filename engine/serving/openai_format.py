"""OpenAI's request bodies, checked and brought to the engine's words. No jax.

`POST /v1/chat/completions` and `POST /v1/completions`; vLLM's further sampling fields
are taken, too. Nothing is dropped in silence: a field that cannot be served is an
error that names it, and IGNORED lists those that change no token. Messages name a
field and quote no prompt. What goes back is in openai_objects.py.
"""

from collections.abc import Mapping
from typing import Any

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured_params import StructuredOutputsParams, shown

IGNORED = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
        "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields that change no token; any value is taken."""

CALLERS = frozenset({"model", "stream", "stream_options"})
"""Fields that are the caller's to look at: they say who answers, and how."""

# Same name and meaning in SamplingParams.
_SAME = frozenset(
    {
        "allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos",
        "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens", "n",
        "presence_penalty", "repetition_penalty", "seed", "skip_special_tokens",
        "stop", "stop_token_ids", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
# Served by nobody here, so only the values that ask for nothing are taken.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}
_ROLES = ("system", "developer", "user", "assistant")
# Of a message that an earlier reply gave: taken where they say nothing.
_SILENT_FIELDS = ("annotations", "audio", "function_call", "refusal", "tool_calls")
MAX_MESSAGES, MAX_PARTS, MAX_STOPS, MAX_TOP_LOGPROBS = 4096, 1024, 64, 20


def sampling_of_body(body: Mapping[str, Any], *, is_chat: bool) -> SamplingParams:
    """How a request body wants to be sampled; null stands for the default.

    Args:
      body: parsed JSON of the request.
      is_chat: a chat has `max_completion_tokens`, takes what the context leaves where
        no limit is given, and `logprobs` is a bool; a completion's limit is 16.

    Raises:
      ValueError: an unknown field, or a value out of its range; the field is named.
    """
    _check_fields(body, is_chat=is_chat)
    values = {name: body[name] for name in _SAME if body.get(name) is not None}
    stop = values.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise ValueError(f"stop must be at most {MAX_STOPS} strings, got {len(stop)}")
    values["max_tokens"] = _max_tokens(body, is_chat=is_chat)
    values["logprobs"] = _chat_logprobs(body) if is_chat else body.get("logprobs")
    if values["logprobs"] == -1:  # SamplingParams' whole vocabulary
        raise ValueError("logprobs must be 0 or more, got -1")
    values["structured_outputs"] = _structured(body)
    try:
        return SamplingParams(**values)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a sampling field has a wrong value: {error}") from None


def prompt_of_body(body: Mapping[str, Any], *, is_chat: bool) -> Any:
    """What a request body asks about.

    Returns:
      Of a chat its messages, each with str "role" and "content", for the chat template
      (a developer's message is a system message to it); of a completion {"prompt": str}
      or {"prompt_token_ids": [ids]}.

    Raises:
      ValueError: it is missing or malformed, or there are several prompts.
    """
    if is_chat:
        return _messages(body.get("messages"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not _is_id(prompt[0]):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
        return {"prompt_token_ids": prompt}
    if isinstance(prompt, list) and len(prompt) > 1:
        raise ValueError("prompt must be one prompt a request, got a list of several")
    raise ValueError(
        f"prompt must be a string or a list of token ids, got {_kind(prompt)}"
    )


def _check_fields(body: Mapping[str, Any], *, is_chat: bool) -> None:
    own = ("messages", "max_completion_tokens", "top_logprobs") if is_chat else ()
    known = {
        *_SAME, *IGNORED, *CALLERS, *_NEUTRAL, *own, "max_tokens", "logprobs",
        "response_format", "structured_outputs", *(() if is_chat else ("prompt",)),
    }  # fmt: skip
    unknown = sorted(name for name in body if name not in known)
    if unknown:
        raise ValueError(f"unknown field {shown(unknown[0])}; known: {sorted(known)}")
    for name, allowed in _NEUTRAL.items():
        value = body.get(name)
        # 1 == True: a bool is no number here.
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise ValueError(f"{name} is not supported, got {shown(value)}")


def _max_tokens(body: Mapping[str, Any], *, is_chat: bool) -> Any:
    limit, newer = body.get("max_tokens"), body.get("max_completion_tokens")
    if limit is not None and newer is not None and limit != newer:
        raise ValueError(
            f"max_tokens and max_completion_tokens must agree, got {shown(limit)} and "
            f"{shown(newer)}"
        )
    limit = newer if limit is None else limit
    return 16 if limit is None and not is_chat else limit


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if not isinstance(wanted, bool | None):
        raise ValueError(f"logprobs must be true or false, got {shown(wanted)}")
    if top is None:
        return 0 if wanted else None
    if isinstance(top, bool) or not isinstance(top, int):
        raise ValueError(f"top_logprobs must be a whole number, got {shown(top)}")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ValueError(f"top_logprobs must be in [0, {MAX_TOP_LOGPROBS}], got {top}")
    if not wanted:
        raise ValueError("top_logprobs needs logprobs true")
    return top


def _structured(body: Mapping[str, Any]) -> Any:
    """The structure that the text must have, by either of its two names."""
    wanted, own = body.get("response_format"), body.get("structured_outputs")
    if wanted is None:
        return own
    if own is not None:
        raise ValueError("response_format and structured_outputs must not both be set")
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise ValueError(
            "response_format must have the type 'text', 'json_object' or "
            f"'json_schema', got {shown(wanted)}"
        )
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError(
            f"response_format.json_schema.schema must be an object, got {shown(schema)}"
        )
    return StructuredOutputsParams(json=schema)


def _messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise ValueError(
            f"messages must be a list of 1 to {MAX_MESSAGES}, got {_kind(messages)}"
        )
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be an object, got {_kind(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(f"{name}.role must be in {_ROLES}, got {shown(role)}")
    for field, value in message.items():
        if field in _SILENT_FIELDS and value in (None, []):
            continue
        if field not in ("role", "content", "name"):
            raise ValueError(f"{name} has a field that is not known: {shown(field)}")
    checked = {"role": "system" if role == "developer" else role}
    checked["content"] = _content(f"{name}.content", message.get("content"))
    if (speaker := message.get("name")) is not None:
        if not isinstance(speaker, str):
            raise ValueError(f"{name}.name must be a string, got {_kind(speaker)}")
        checked["name"] = speaker
    return checked


def _content(name: str, content: object) -> str:
    """The text of a message; parts are joined as they stand."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        raise ValueError(
            f"{name} must be a string or 1 to {MAX_PARTS} text parts, got "
            f"{_kind(content)}"
        )
    return "".join(_part(f"{name}[{i}]", part) for i, part in enumerate(content))


def _part(name: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise ValueError(f"{name} must be a part of type 'text', got {shown(kind)}")
    return text


def _kind(value: object) -> str:
    """What a value is. What users ask about is not quoted in messages."""
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, list) else name


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def num_top_logprobs(params: SamplingParams) -> int:
    """How many likeliest tokens a reply lists per place."""
    return max(0, params.logprobs or 0)
