"""What an offline job writes for a row: one line of JSON, the same in every run.

No clock, no random id, no timing and nothing that depends on a row's company: ids
follow from the job's fingerprint and the line's number, `created` is 0.
"""

import dataclasses
import hashlib
import json
from typing import Any

from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.engine.serving.openai_format import num_top_logprobs
from headrace.engine.serving.openai_objects import chat_body, completion_body, usage
from headrace.scripts.batch_rows import BadRow, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordStyle:
    """What all records of a job share.

    Attributes:
      job: the job's fingerprint.
      model: name in OpenAI replies to rows that give none.
      has_token_ids: plain rows list the ids of their output.
    """

    job: str
    model: str
    has_token_ids: bool = False


def record_of(
    row: Row, output: RequestOutput, style: RecordStyle
) -> tuple[bytes, bool]:
    """A finished row's record, without a line end, and whether it is an error.

    A completion that failed ("error", "rejected" and the like) makes it one.
    """
    message = output.error
    for one in output.outputs:
        if message is None and one.finish_reason not in ("stop", "length"):
            reason = one.finish_message or "no reason given"
            message = f"the request ended with {one.finish_reason!r}: {reason}"
    if message is not None:
        return error_record(failed(row, message), style), True
    fields = (_plain if row.form == "plain" else _openai)(row, output, style)
    try:
        return _dumped(fields), False
    except ValueError:  # JSON has no word for such a log-probability
        return error_record(failed(row, "a number is not finite"), style), True


def failed(row: Row, message: str) -> BadRow:
    """A row that the engine refused, or could not finish."""
    return BadRow(
        line=row.line, form=row.form, id=row.id, code="failed", message=message
    )


def error_record(row: BadRow, style: RecordStyle) -> bytes:
    """The record of a row that cannot run; it names the line.

    A line that could not be read at all has the keys of both formats.
    """
    error = {
        "code": row.code,
        "message": f"line {row.line}: {row.message}",
        "line": row.line,
    }
    fields: dict[str, Any] = {"line": row.line, "id": row.id}
    if row.form is None:
        fields |= {"custom_id": None, "response": None}
    elif row.form != "plain":
        fields = {
            "id": _name("batch_req_", row.line, style),
            "custom_id": row.id,
            "response": None,
        }
    return _dumped(fields | {"error": error})


def _openai(row: Row, output: RequestOutput, style: RecordStyle) -> dict[str, Any]:
    common: dict[str, Any] = {
        "created": 0,
        "model": row.model or style.model,
        "num_top": num_top_logprobs(row.params),
        "system_fingerprint": f"fp_{style.job[:16]}",
    }
    if row.form == "chat":
        body = chat_body(output, id=_name("chatcmpl-", row.line, style), **common)
    else:
        name = _name("cmpl-", row.line, style)
        body = completion_body([output], id=name, **common)
    response = {
        "status_code": 200,
        "request_id": _name("req_", row.line, style),
        "body": body,
    }
    return {
        "id": _name("batch_req_", row.line, style),
        "custom_id": row.id,
        "response": response,
        "error": None,
    }


def _plain(row: Row, output: RequestOutput, style: RecordStyle) -> dict[str, Any]:
    fields: dict[str, Any] = {"line": row.line, "id": row.id}
    whole = [_completion(one, row, style) for one in output.outputs]
    if row.params.n == 1:
        fields |= whole[0]
    else:
        fields["outputs"] = [{"index": i} | one for i, one in enumerate(whole)]
    if output.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [
            step and _named(step) for step in output.prompt_logprobs
        ]
    return fields | {"usage": usage([output]), "error": None}


def _completion(
    completion: CompletionOutput, row: Row, style: RecordStyle
) -> dict[str, Any]:
    fields: dict[str, Any] = {"text": completion.text}
    # Without text they are all that there is; beside log-probabilities they say whose.
    has_logprobs = completion.logprobs is not None
    if style.has_token_ids or not row.params.detokenize or has_logprobs:
        fields["token_ids"] = list(completion.token_ids)
    fields |= {
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
    }
    if has_logprobs:
        fields["cumulative_logprob"] = completion.cumulative_logprob
        fields["logprobs"] = [_named(step) for step in completion.logprobs or ()]
    return fields


def _named(step: dict[int, Logprob]) -> dict[str, Any]:
    """Log-probabilities of one place, as JSON has them; the likeliest first."""
    ordered = sorted(step.items(), key=lambda item: (-item[1].logprob, item[0]))
    return {str(token_id): dataclasses.asdict(one) for token_id, one in ordered}


def _name(prefix: str, line: int, style: RecordStyle) -> str:
    """An id that is the row's own, in every run of the job."""
    data = f"{style.job}:{prefix}:{line}".encode()
    return prefix + hashlib.blake2b(data, digest_size=12).hexdigest()


def _dumped(fields: dict[str, Any]) -> bytes:
    # ASCII: a reader that breaks lines at U+2028 reads these, too, and half of a
    # surrogate pair in a row's id comes back as it came.
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
