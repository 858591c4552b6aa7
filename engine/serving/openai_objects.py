"""What goes back in OpenAI's words: completion and chat objects. Pure, no jax.

Ids and times are arguments: this file knows no clock and draws nothing.
"""

from collections.abc import Sequence
from typing import Any

from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput

FINISH_REASONS = {"stop": "stop", "length": "length", "deadline": "length"}
"""Ours to OpenAI's; the others have no counterpart: such a request has failed."""


def completion_body(
    outputs: Sequence[RequestOutput],
    *,
    id: str,
    created: int,
    model: str,
    num_top: int = 0,
    system_fingerprint: str | None = None,
) -> dict[str, Any]:
    """A `text_completion` object.

    Args:
      outputs: of each prompt of the request; their completions are numbered through.
      id: such as "cmpl-...".
      created: seconds since 1970.
      model: name that the reply carries.
      num_top: likeliest tokens listed per place, where log-probabilities were asked.
      system_fingerprint: left out where None.

    Raises:
      ValueError: a completion did not end in a way that OpenAI has a word for.
    """
    completions = [one for output in outputs for one in output.outputs]
    choices = [
        {
            "index": index,
            "text": one.text,
            "logprobs": text_logprobs(one, num_top),
            "finish_reason": finish_reason(one),
        }
        for index, one in enumerate(completions)
    ]
    head = _head(id, "text_completion", created, model, system_fingerprint)
    return head | {"choices": choices, "usage": usage(outputs)}


def chat_body(
    output: RequestOutput,
    *,
    id: str,
    created: int,
    model: str,
    num_top: int = 0,
    system_fingerprint: str | None = None,
) -> dict[str, Any]:
    """A `chat.completion` object; arguments and errors as for `completion_body`."""
    choices = [
        {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": chat_logprobs(one, num_top),
            "finish_reason": finish_reason(one),
        }
        for one in output.outputs
    ]
    head = _head(id, "chat.completion", created, model, system_fingerprint)
    return head | {"choices": choices, "usage": usage([output])}


def usage(outputs: Sequence[RequestOutput]) -> dict[str, int]:
    """Tokens of prompts, counted once each, and of all their completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(one.token_ids) for o in outputs for one in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def finish_reason(completion: CompletionOutput) -> str:
    """OpenAI's word for how a completion ended.

    Raises:
      ValueError: it has failed or was given up, for which there is none.
    """
    reason = completion.finish_reason
    if reason not in FINISH_REASONS:
        raise ValueError(
            f"the request ended with {reason!r}: {completion.finish_message}"
        )
    return FINISH_REASONS[reason]


def chat_logprobs(completion: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """`logprobs` of a chat choice; None where they were not asked."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, step in _steps(completion):
        top = [_named(*one) for one in _likeliest(step)[:num_top]]
        content.append(_named(token_id, step[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(
    completion: CompletionOutput, num_top: int, start: int = 0
) -> dict[str, Any] | None:
    """`logprobs` of a text choice; None where they were not asked.

    Args:
      completion: whole, or a piece of a stream.
      num_top: as in `completion_body`.
      start: offset of the first token's text, in characters.
    """
    if completion.logprobs is None:
        return None
    steps = _steps(completion)
    tokens = [token_text(token_id, step[token_id]) for token_id, step in steps]
    offsets, length = [], start
    for token in tokens:
        offsets.append(length)
        length += len(token)
    tops = None
    if num_top:
        # Two ids may have the same text: the likelier one, which comes first, stays.
        tops = [
            {token_text(*one): one[1].logprob for one in reversed(_likeliest(step))}
            for _, step in steps
        ]
    return {
        "tokens": tokens,
        "token_logprobs": [step[token_id].logprob for token_id, step in steps],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def token_text(token_id: int, one: Logprob) -> str:
    """A token's text, or what stands for it where the model has no tokenizer."""
    text = one.decoded_token
    return f"token_id:{token_id}" if text is None else text


def _named(token_id: int, one: Logprob) -> dict[str, Any]:
    text = token_text(token_id, one)
    # A part of a character: its bytes are not at hand, and those of U+FFFD are not its.
    is_whole = one.decoded_token is not None and "\ufffd" not in text
    bytes_ = list(text.encode()) if is_whole else None
    return {"token": text, "logprob": one.logprob, "bytes": bytes_}


def _steps(completion: CompletionOutput) -> list[tuple[int, dict[int, Logprob]]]:
    assert completion.logprobs is not None
    return list(zip(completion.token_ids, completion.logprobs, strict=True))


def _likeliest(step: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
    """The tokens of a place, the likeliest first; equal ones by id."""
    return sorted(step.items(), key=lambda item: (-item[1].logprob, item[0]))


def _head(
    id: str, kind: str, created: int, model: str, system_fingerprint: str | None
) -> dict[str, Any]:
    head = {"id": id, "object": kind, "created": created, "model": model}
    if system_fingerprint is not None:
        head["system_fingerprint"] = system_fingerprint
    return head
