"""What the client sends and what it gives back. Host side, no jax, no channel."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from headrace.engine.outputs import CompletionOutput, Logprob
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.grpc_params import write_params
from headrace.engine.serving.proto import generation_pb2 as pb

_PUSHBACK = "grpc-retry-pushback-ms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """How to trust a server, and how to be trusted: paths of PEM files.

    Attributes:
      ca: that signed the server's certificate; None takes gRPC's own list.
      cert, key: of this client, for mutual TLS.
      server_name: on the certificate, where it is not the address.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The output of a call, or a piece of it in a stream.

    Attributes:
      request_id: for `cancel`.
      outputs: completions as the engine has them; in a stream what came since the
        last piece.
      finished: nothing more will come.
      prompt_tokens, output_tokens: so far, of all completions together.
      prompt_logprobs: per prompt token, None for the first; None where not asked.
    """

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt_tokens: int
    output_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None

    @property
    def text(self) -> str:
        """Text of the first completion; "" in a piece that has none of it."""
        return next((one.text for one in self.outputs if one.index == 0), "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreResult:
    """How likely a continuation is; natural logarithms.

    Attributes:
      token_ids, logprobs, ranks: per token of the continuation; rank 1 is likeliest.
      logprob: their sum.
      is_greedy: whether greedy decoding would give just this continuation.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    logprob: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a server serves; fields as in `generation.proto`."""

    model_name: str
    version: str
    max_context_tokens: int
    vocab_size: int
    has_tokenizer: bool
    has_chat_template: bool
    scores: bool
    numerics: str


class CallError(Exception):
    """A call that was refused, failed, or ran out of time.

    Attributes:
      code: gRPC's name of the status, such as "INVALID_ARGUMENT".
      message: the server's.
      retry_after_s: after which the server would take the same call; None where it
        did not say.
    """

    def __init__(self, code: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.retry_after_s = code, message, retry_after_s


def call_error(error: grpc.RpcError) -> CallError:
    """gRPC's error, sync or async, as ours."""
    code, trailing = error.code(), error.trailing_metadata()  # type: ignore[attr-defined]
    hints = [value for name, value in trailing or () if name == _PUSHBACK]
    after_s = int(hints[0]) / 1000 if hints else None
    return CallError(code.name, error.details() or "", after_s)  # type: ignore[attr-defined]


def generate_request(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    params: SamplingParams | Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> pb.GenerateRequest:
    """What `Client.generate` is given, as a message.

    Raises:
      ValueError: none or several of the prompts, or a parameter out of its range.
    """
    given = [x for x in (prompt, messages, token_ids) if x is not None]
    if len(given) != 1:
        raise ValueError(
            f"exactly one of prompt, messages and token_ids must be given, got "
            f"{len(given)}"
        )
    times = {k: options[k] for k in _OPTIONS if options.get(k) is not None}
    sampling = {k: v for k, v in options.items() if k not in _OPTIONS}
    if params is not None and sampling:
        raise ValueError(f"params or single parameters, got both: {sorted(sampling)}")
    if not isinstance(params, SamplingParams):
        params = SamplingParams(**(params or sampling))
    request = pb.GenerateRequest(params=write_params(params), **times)
    if messages is not None:
        for message in messages:
            request.conversation.messages.add(**message)
        request.conversation.SetInParent()
    elif isinstance(prompt, str):
        request.text = prompt
    else:
        ids = token_ids if prompt is None else prompt
        request.token_ids.CopyFrom(pb.TokenIds(ids=ids))
    return request


_OPTIONS = ("request_id", "deadline_s", "queue_timeout_s", "uses_cache")


def score_request(
    prompt: str | Sequence[int], continuation: str | Sequence[int]
) -> pb.ScoreRequest:
    """What `Client.score` is given, as a message."""
    request = pb.ScoreRequest()
    for name, part in (("prompt", prompt), ("continuation", continuation)):
        if isinstance(part, str):
            setattr(request, f"{name}_text", part)
        else:
            getattr(request, f"{name}_ids").CopyFrom(pb.TokenIds(ids=part))
    return request


def generate_result(response: pb.GenerateResponse) -> GenerateResult:
    """A response as users see it."""
    prompt_logprobs = [_logprobs(one) or None for one in response.prompt_logprobs]
    return GenerateResult(
        request_id=response.request_id,
        outputs=[_completion(one) for one in response.completions],
        finished=response.finished,
        prompt_tokens=response.usage.prompt_tokens,
        output_tokens=response.usage.output_tokens,
        prompt_logprobs=prompt_logprobs or None,
    )


def _completion(message: pb.Completion) -> CompletionOutput:
    def maybe(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]

    stop = message.WhichOneof("stop_reason")
    return CompletionOutput(
        index=message.index,
        text=message.text,
        token_ids=list(message.token_ids),
        cumulative_logprob=maybe("cumulative_logprob"),
        logprobs=[_logprobs(one) for one in message.logprobs] or None,
        finish_reason=maybe("finish_reason"),
        finish_message=maybe("finish_message"),
        stop_reason=getattr(message, stop) if stop else None,
        seed=maybe("seed"),
    )


def _logprobs(message: pb.TokenLogprobs) -> dict[int, Logprob]:
    return {
        one.token_id: Logprob(
            one.logprob,
            one.rank if one.HasField("rank") else None,
            one.text if one.HasField("text") else None,
        )
        for one in message.entries
    }


def score_result(response: pb.ScoreResponse) -> ScoreResult:
    """A response as users see it."""
    return ScoreResult(
        token_ids=list(response.token_ids),
        logprobs=list(response.logprobs),
        ranks=list(response.ranks),
        logprob=response.logprob,
        is_greedy=response.is_greedy,
    )


def model_info(response: pb.ModelInfoResponse) -> ModelInfo:
    """A response as users see it."""
    names = [field.name for field in dataclasses.fields(ModelInfo)]
    return ModelInfo(**{name: getattr(response, name) for name in names})
