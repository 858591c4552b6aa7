"""Prompts from a file, and results to a file. Knows nothing of engines.

A `.jsonl` file holds one object a line: `prompt`, `prompt_token_ids` or `messages`,
an optional `id`, and any field of SamplingParams, which replaces the flag's value.
Every other file holds one prompt a line. Lines that are blank are skipped.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from headrace.engine.outputs import RequestOutput
from headrace.engine.sampling_params import SamplingParams

CONTENTS = ("prompt", "prompt_token_ids", "messages")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRow:
    """One line of the file.

    Attributes:
      id: from the file, or the line's number from 0.
      kind: "line" for a plain text line, else one of CONTENTS.
      content: what stands under that key.
      params: sampling of this row.
    """

    id: str | int
    kind: str
    content: Any
    params: SamplingParams


def read_rows(path: str, params: SamplingParams) -> list[PromptRow]:
    """Reads and checks a whole file before anything runs.

    Args:
      path: of the file; `.jsonl` and `.txt`-like files differ as said above.
      params: sampling of rows that do not say otherwise.

    Raises:
      ValueError: no prompt in the file, or a line that is wrong; it is named.
      OSError: the file cannot be read.
    """
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(_row(path, line, len(rows), params))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no prompt")
    return rows


def _row(path: str, line: str, index: int, params: SamplingParams) -> PromptRow:
    if not path.endswith(".jsonl"):
        text = line.rstrip("\r\n")
        return PromptRow(id=index, kind="line", content=text, params=params)
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
    return PromptRow(id=row_id, kind=given[0], content=content, params=changed)


def result_fields(row: PromptRow, output: RequestOutput) -> dict[str, Any]:
    """A JSON-ready result of one row."""
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "id": row.id,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
        "error": output.error,
    }
    if completion.logprobs is not None:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [
            {str(token_id): dataclasses.asdict(one) for token_id, one in step.items()}
            for step in completion.logprobs
        ]
    return fields


@contextlib.contextmanager
def results_file(path: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name once it is whole."""
    if path is None:
        yield sys.stdout
        return
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        yield file
    os.replace(partial, path)
