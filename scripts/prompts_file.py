"""Prompts from a file, and results to a file. Knows nothing of engines.

A `.jsonl` file holds one object a line: `prompt`, `prompt_token_ids` or `messages`,
an optional `id`, and any field of SamplingParams, which replaces the flag's value.
Every other file holds one prompt a line. Lines that are blank are skipped.
A line that is malformed stops everything before an engine is built; content of a wrong
type is that row's error alone.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from headrace.engine.outputs import Logprob, RequestOutput
from headrace.engine.prompts import as_prompt_or_error
from headrace.engine.sampling_params import SamplingParams

CONTENTS = ("prompt", "prompt_token_ids", "messages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One line of the file.

    Attributes:
      id: from the file, or the row's number from 0.
      line: number of the line from 1.
      kind: "line" for a plain text line, else one of CONTENTS.
      content: what stands under that key.
      params: sampling of this row.
      error: why it cannot run, None if it looks sound.
    """

    id: str | int
    line: int
    kind: str
    content: Any
    params: SamplingParams
    error: str | None = None


def read_rows(path: str, params: SamplingParams) -> list[PromptRow]:
    """Reads and checks a whole file before anything runs.

    Args:
      path: of the file; `.jsonl` and `.txt`-like files differ as said above.
      params: sampling of rows that do not say otherwise.

    Raises:
      ValueError: no prompt in the file, or a line that is wrong; it is named.
      OSError: the file cannot be read.
    """
    rows: list[PromptRow] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                if path.endswith(".jsonl"):
                    row = _json_row(line, params, index=len(rows), number=number)
                else:
                    row = PromptRow(
                        id=len(rows),
                        line=number,
                        kind="line",
                        content=line.rstrip("\r\n"),
                        params=params,
                    )
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} holds no prompt")
    return rows


def _json_row(
    line: str, params: SamplingParams, *, index: int, number: int
) -> PromptRow:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"wants a JSON object, got {type(fields).__name__}")
    row_id = fields.pop("id", index)
    given = [kind for kind in CONTENTS if kind in fields]
    if len(given) != 1:
        raise ValueError(f"wants one of {CONTENTS}, got {given}")
    content = fields.pop(given[0])
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"unknown keys {unknown}; known: {sorted(known)}")
    changed = dataclasses.replace(params, **fields)
    if changed.n > 1:
        raise ValueError(f"n must be 1 in a file of prompts, got {changed.n}")
    # A file has whole results, whatever a stream would yield.
    changed = dataclasses.replace(changed, output_kind="delta")
    return PromptRow(
        id=row_id,
        line=number,
        kind=given[0],
        content=content,
        params=changed,
        error=_content_error(given[0], content),
    )


def _content_error(kind: str, content: Any) -> str | None:
    """What is wrong with the content's type; the engine looks at the values."""
    if kind == "messages":
        is_list = isinstance(content, list)
        return None if is_list else f"messages must be a list, got {content!r:.80}"
    prompt = as_prompt_or_error({kind: content})
    return str(prompt) if isinstance(prompt, ValueError) else None


def result_fields(row: PromptRow, output: RequestOutput) -> dict[str, Any]:
    """A JSON-ready result of one row."""
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "id": row.id,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "finish_message": completion.finish_message,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "error": output.error and f"line {row.line}: {output.error}",
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_named(step) for step in completion.logprobs]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            step and _named(step) for step in output.prompt_logprobs
        ]
    return fields


def _named(step: dict[int, Logprob]) -> dict[str, Any]:
    """Log-probabilities of one place, as JSON has them."""
    return {str(token_id): dataclasses.asdict(one) for token_id, one in step.items()}


def whole_output(pieces: Iterable[RequestOutput]) -> RequestOutput:
    """A stream's deltas as one output, as if it had not been streamed."""
    text, token_ids, logprobs, prompt_logprobs = "", [], [], None
    for output in pieces:
        prompt_logprobs = prompt_logprobs or output.prompt_logprobs
        piece = output.outputs[0]
        text += piece.text
        token_ids += piece.token_ids
        logprobs += piece.logprobs or ()
    joined = dataclasses.replace(
        piece,
        text=text,
        token_ids=token_ids,
        logprobs=None if piece.logprobs is None else logprobs,
    )
    return dataclasses.replace(
        output, outputs=[joined], prompt_logprobs=prompt_logprobs
    )


@contextlib.contextmanager
def results_file(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name once it is whole.

    Until then it is called `path`.partial, where what was written stays after an
    interruption.

    Raises:
      ValueError: `path` is empty or a folder.
      OSError: the file cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    if not path or os.path.isdir(path):
        raise ValueError(f"the results need the name of a file, got {path!r}")
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            if file.tell():
                print(f"the rows that finished are in {partial}", file=sys.stderr)
            else:
                os.unlink(partial)
            raise
    os.replace(partial, path)
