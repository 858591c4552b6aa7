"""Requests of the protocol to calls, outputs to its responses. Host side, no jax."""

from collections.abc import Mapping, Sequence

from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.engine.serving.calls import Call, check_request_id
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.grpc_params import read_params
from headrace.engine.serving.limits import ServiceLimits, check_at_most
from headrace.engine.serving.proto import generation_pb2 as pb


def read_call(request: pb.GenerateRequest, limits: ServiceLimits) -> Call:
    """A request for text as the service takes it.

    Raises:
      ServiceError: invalid_argument, with field, value and range.
    """
    prompt: str | Sequence[int] | None = None
    messages: list[dict[str, str]] | None = None
    match request.WhichOneof("prompt"):
        case "text":
            prompt = request.text
        case "token_ids":
            prompt = list(request.token_ids.ids)
        case "conversation":
            messages = _read_messages(request.conversation, limits)
        case _:
            raise _unset("prompt", "text, token_ids and conversation")
    request_id = None
    if request.HasField("request_id"):
        request_id = check_request_id("request_id", request.request_id)
    has = request.HasField
    return Call(
        prompt=prompt,
        messages=messages,
        params=read_params(request.params, limits),
        deadline_s=request.deadline_s if has("deadline_s") else None,
        queue_timeout_s=request.queue_timeout_s if has("queue_timeout_s") else None,
        uses_cache=request.uses_cache if has("uses_cache") else True,
        request_id=request_id,
    )


def _read_messages(
    conversation: pb.Conversation, limits: ServiceLimits
) -> list[dict[str, str]]:
    messages = conversation.messages
    check_at_most("number of messages", len(messages), limits.max_messages)
    return [{"role": one.role, "content": one.content} for one in messages]


def read_pair(
    request: pb.ScoreRequest,
) -> tuple[str | Sequence[int], str | Sequence[int]]:
    """Prompt and continuation of a request for a score.

    Raises:
      ServiceError: invalid_argument: one of them is not set.
    """
    found: list[str | Sequence[int]] = []
    for name in ("prompt", "continuation"):
        field = request.WhichOneof(name)  # type: ignore[arg-type]
        if field is None:
            raise _unset(name, f"{name}_text and {name}_ids")
        value = getattr(request, field)
        found.append(value if isinstance(value, str) else list(value.ids))
    return found[0], found[1]


def _unset(name: str, choices: str) -> ServiceError:
    return ServiceError(
        "invalid_argument", f"{name}: one of {choices} must be set, got none"
    )


def write_output(output: RequestOutput) -> pb.GenerateResponse:
    """What an engine's output, whole or a delta, is as a response.

    Raises:
      ServiceError: internal: the engine has failed.
    """
    response = pb.GenerateResponse(
        request_id=output.request_id, finished=output.finished
    )
    for completion in output.outputs:
        _write_completion(completion, output.error, response.completions.add())
    for entry in output.prompt_logprobs or ():
        _write_logprobs(entry or {}, response.prompt_logprobs.add())
    if output.metrics is not None:
        response.usage.prompt_tokens = output.metrics.num_prompt_tokens
        response.usage.output_tokens = output.metrics.num_output_tokens
    return response


def _write_completion(
    completion: CompletionOutput, error: str | None, message: pb.Completion
) -> None:
    message.index, message.text = completion.index, completion.text
    message.token_ids.extend(completion.token_ids)
    for entry in completion.logprobs or ():
        _write_logprobs(entry, message.logprobs.add())
    why = completion.finish_message or error
    if completion.finish_reason is not None:
        message.finish_reason = completion.finish_reason
        if completion.finish_reason == "error" and why is None:
            # A request's own fault has a message; without one it was the engine's.
            raise ServiceError("internal", "the engine has failed")
    if why is not None:
        message.finish_message = why
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason
    if completion.seed is not None:
        message.seed = completion.seed % 2**64
    if completion.cumulative_logprob is not None:
        message.cumulative_logprob = completion.cumulative_logprob


def _write_logprobs(entry: Mapping[int, Logprob], message: pb.TokenLogprobs) -> None:
    for token_id, one in entry.items():
        message.entries.add(
            token_id=token_id,
            logprob=one.logprob,
            rank=one.rank,
            text=one.decoded_token,
        )
