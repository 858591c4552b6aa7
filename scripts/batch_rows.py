"""Rows of an offline job: JSONL lines from strangers, read in bounded memory.

A line is one of OpenAI's batch format (`custom_id`, `method`, `url`, `body`), or a
plain object: `prompt`, `messages` or `prompt_token_ids`, an optional `id`, and any
field of SamplingParams. What is wrong with a line is that row's error alone. Knows
nothing of engines and journals.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from headrace.engine.prompts import as_prompt
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.openai_format import prompt_of_body, sampling_of_body
from headrace.engine.serving.strict_json import parse_object

Form = Literal["plain", "chat", "completion"]

URLS: dict[str, Form] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
_CONTENTS = ("prompt", "messages", "prompt_token_ids")
_ENVELOPE = ("custom_id", "method", "url", "body")
# A file has whole results, so `output_kind` says nothing.
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {
    "output_kind"
}
MAX_ID_CHARS = 512
# What a wrong value can raise on its way through the checks.
_FAULTS = (ValueError, TypeError, OverflowError, RecursionError)
_PIECE = 1 << 20


class Line(NamedTuple):
    """A line of the input that is not blank; `text` is None where it is too long."""

    number: int
    text: bytes | None


@dataclasses.dataclass(kw_only=True, slots=True)
class Row:
    """A row that can be tried.

    Attributes:
      line: its number in the input, from 1.
      form: which decides the shape of its record.
      id: `custom_id`, or a plain row's `id`; None where it has none.
      prompt: {"prompt"} or {"prompt_token_ids"}; None where there are `messages`.
      messages: a conversation for the chat template.
      params: sampling, its seed set.
      model: name that an OpenAI row gives, to be repeated.
      size: the work that it can be at most, in tokens; an estimate.
    """

    line: int
    form: Form
    id: str | int | None
    prompt: dict[str, Any] | None
    messages: Any
    params: SamplingParams
    model: str | None = None
    size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be tried, or has failed.

    Attributes:
      form: None where the line is not read far enough to tell.
      code: "invalid_json", "invalid_request", or "failed".
      message: what is wrong, without the line's number.
    """

    line: int
    form: Form | None
    id: str | int | None
    code: str
    message: str


class Digest(Protocol):
    """What a hash of the standard library is to `read_lines`."""

    def update(self, data: bytes, /) -> None:
        """Takes in further bytes."""


def read_lines(
    file: BinaryIO, max_line_bytes: int, digest: Digest | None = None
) -> Iterator[Line]:
    """Lines that are not blank, numbered with those that are.

    Args:
      file: at its beginning; a UTF-8 mark there is skipped.
      max_line_bytes: of a longer line no more than this is held.
      digest: is fed with every byte of the file.
    """
    number = 0
    while piece := file.readline(max_line_bytes + 1):
        number += 1
        if digest is not None:
            digest.update(piece)
        is_whole = piece.endswith(b"\n") or len(piece) <= max_line_bytes
        while not piece.endswith(b"\n") and (rest := file.readline(_PIECE)):
            piece = rest
            if digest is not None:
                digest.update(rest)
        if number == 1 and is_whole:
            piece = piece.removeprefix(b"\xef\xbb\xbf")
        if not is_whole:
            yield Line(number, None)
        elif not piece.isspace() and piece:
            yield Line(number, piece)


def is_of_shard(number: int, shard: tuple[int, int]) -> bool:
    """Whether a line belongs to shard i of n: (number mod n) == i."""
    return number % shard[1] == shard[0]


def seed_of(job: str, line: int) -> int:
    """The seed of a row without one: 63 bits, of the job's fingerprint and the line."""
    data = f"{job}:{line}".encode()
    digest = hashlib.blake2b(data, digest_size=8, person=b"headrace-batch").digest()
    return int.from_bytes(digest, "little") >> 1


def parse_row(line: Line, defaults: Mapping[str, Any], job: str) -> Row | BadRow:
    """A line as a row; never raises.

    Args:
      line: of `read_lines`.
      defaults: fields of SamplingParams, for plain rows that do not say otherwise.
      job: the job's fingerprint, for seeds.
    """
    if line.text is None:
        message = "the line is longer than max_line_bytes"
        return _bad(line, None, None, message, code="invalid_json")
    try:
        fields = parse_object(line.text)
    except _FAULTS as error:
        return _bad(line, None, None, str(error), code="invalid_json")
    form: Form = "plain"
    row_id, seed = None, seed_of(job, line.number)
    try:
        if any(name in fields for name in ("custom_id", "url", "body")):
            form = URLS.get(str(fields.get("url")), "completion")
            row_id = _checked_id("custom_id", fields.get("custom_id"))
            row = _openai_row(line.number, fields, seed)
        else:
            row_id = _checked_id("id", fields.pop("id", None))
            row = _plain_row(line.number, fields, defaults, seed)
    except _FAULTS as error:
        return _bad(line, form, row_id, str(error))
    row.id, row.size = row_id, _size(row, len(line.text))
    return row


def _bad(
    line: Line,
    form: Form | None,
    row_id: str | int | None,
    message: str,
    *,
    code: str = "invalid_request",
) -> BadRow:
    return BadRow(line=line.number, form=form, id=row_id, code=code, message=message)


def _checked_id(name: str, value: object) -> str | int | None:
    is_plain_int = isinstance(value, int) and not isinstance(value, bool)
    if is_plain_int and name == "id" and -(2**63) <= value < 2**64:  # type: ignore[operator]
        return value  # type: ignore[return-value]
    if value is None and name == "id":
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise ValueError(
            f"{name} must be a string of 1 to {MAX_ID_CHARS} characters"
            f"{', or a whole number of 64 bits' if name == 'id' else ''}, got "
            f"{_short(value)}"
        )
    return value


def _openai_row(number: int, fields: dict[str, Any], seed: int) -> Row:
    if unknown := sorted(set(fields) - set(_ENVELOPE)):
        raise ValueError(f"a row has the fields {_ENVELOPE}, got {_short(unknown)}")
    if fields.get("method") != "POST":
        raise ValueError(f"method must be 'POST', got {_short(fields.get('method'))}")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise ValueError(f"url must be in {list(URLS)}, got {_short(url)}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object, got {_short(body)}")
    if body.get("stream") not in (None, False):
        raise ValueError("stream must be false in a batch")
    model, is_chat = body.get("model"), URLS[url] == "chat"
    if not isinstance(model, str | None):
        raise ValueError(f"model must be a string, got {_short(model)}")
    if body.get("seed") is None:
        body["seed"] = seed
    params = sampling_of_body(body, is_chat=is_chat)
    prompt = prompt_of_body(body, is_chat=is_chat)
    return Row(
        line=number,
        form=URLS[url],
        id=None,
        prompt=None if is_chat else prompt,
        messages=prompt if is_chat else None,
        params=params,
        model=model,
    )


def _plain_row(
    number: int, fields: dict[str, Any], defaults: Mapping[str, Any], seed: int
) -> Row:
    given = [name for name in _CONTENTS if name in fields]
    if len(given) != 1:
        raise ValueError(f"a row has one of {_CONTENTS}, got {given}")
    content = fields.pop(given[0])
    if unknown := sorted(set(fields) - _FIELDS):
        raise ValueError(
            f"unknown field {_short(unknown[0])}; known: id, one of {_CONTENTS}, and "
            f"{sorted(_FIELDS)}"
        )
    values = {**defaults, **fields}
    if values.get("seed") is None:
        values["seed"] = seed
    params = SamplingParams(**values, output_kind="final_only")
    is_chat = given[0] == "messages"
    if is_chat and not isinstance(content, list):
        raise ValueError(f"messages must be a list, got {type(content).__name__}")
    prompt = None if is_chat else {given[0]: content}
    if prompt is not None:
        as_prompt(prompt)
    return Row(
        line=number,
        form="plain",
        id=None,
        prompt=prompt,
        messages=content if is_chat else None,
        params=params,
    )


def _size(row: Row, num_bytes: int) -> int:
    """Tokens of prompt and outputs; four bytes of text make one, more or less."""
    ids = (row.prompt or {}).get("prompt_token_ids")
    prompt = num_bytes // 4 if ids is None else len(ids)
    # Without a limit a row may fill the context: it comes before those with one.
    limit = 1 << 20 if row.params.max_tokens is None else row.params.max_tokens
    return prompt + limit * row.params.n


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
