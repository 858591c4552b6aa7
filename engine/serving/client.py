"""The Python client of a Headrace server; `headrace.client` has this and the async one.

    with Client("localhost:50051") as client:
        print(client.generate("The capital of France is", max_tokens=8).text)

Imports no jax: it runs where no engine does.
"""

from collections.abc import Generator, Sequence
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2

from headrace.engine.serving.client_calls import (
    Caller,
    Messages,
    Params,
    Prompt,
    as_call_errors,
)
from headrace.engine.serving.client_results import (
    GenerateResult,
    ModelInfo,
    ScoreResult,
    generate_request,
    generate_result,
    model_info,
    score_request,
    score_result,
)
from headrace.engine.serving.proto import generation_pb2 as pb


class Client(Caller):
    """Calls a server and waits; one client may serve many threads.

    Args:
      address: host:port.
      key: bearer key; without `tls` it travels in clear.
      tls: None is plain text.
      timeout_s: of each call, unless a call says otherwise; then it ends with
        CallError DEADLINE_EXCEEDED. None is no bound.
    """

    grpc_kind = grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs, and the connection."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt = None,
        params: Params = None,
        *,
        messages: Messages = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> GenerateResult:
        """The whole output of a prompt.

        Args:
          prompt: a text, or token ids.
          params: how to sample; or give single ones, such as `temperature=0`.
          messages: instead of a prompt: {"role": ..., "content": ...} each.
          token_ids: instead of a prompt.
          timeout_s: of this call.
          **options: `deadline_s` (ends it with what it has), `queue_timeout_s`,
            `request_id`, `uses_cache`, and fields of SamplingParams.

        Raises:
          ValueError: arguments that do not go together or are out of their range.
          CallError: the server refuses, or the call failed.
        """
        request = generate_request(prompt, messages, token_ids, params, options)
        with as_call_errors():
            response = self._stub.GenerateOnce(request, **self._options(timeout_s))
        return generate_result(response)

    def stream(
        self,
        prompt: Prompt = None,
        params: Params = None,
        *,
        messages: Messages = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Generator[GenerateResult, None, None]:
        """Pieces of a prompt's output as they come; arguments as for `generate`.

        The call begins with the first piece asked for. Closing the iterator, or
        dropping it, ends the request on the server.
        """
        request = generate_request(prompt, messages, token_ids, params, options)
        return self._pieces(request, self._options(timeout_s))

    def _pieces(
        self, request: pb.GenerateRequest, options: dict[str, Any]
    ) -> Generator[GenerateResult, None, None]:
        call = self._stub.Generate(request, **options)
        try:
            with as_call_errors():
                for response in call:
                    yield generate_result(response)
        finally:
            call.cancel()

    def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> ScoreResult:
        """How likely a continuation is, each a text or token ids.

        Raises:
          CallError: the server refuses, such as one built without scoring.
        """
        request = score_request(prompt, continuation)
        with as_call_errors():
            return score_result(self._stub.Score(request, **self._options(timeout_s)))

    def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text as `generate` reads it.

        Raises:
          CallError: the server refuses, such as one without a tokenizer.
        """
        request = pb.TokenizeRequest(text=text)
        with as_call_errors():
            response = self._stub.Tokenize(request, **self._options(timeout_s))
        return list(response.token_ids)

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served.

        Raises:
          CallError: the server refuses or cannot be reached.
        """
        request = pb.ModelInfoRequest()
        with as_call_errors():
            return model_info(self._stub.ModelInfo(request, **self._options(timeout_s)))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends one of the caller's requests with what it has; False if none runs.

        Raises:
          CallError: the server refuses or cannot be reached.
        """
        request = pb.CancelRequest(request_id=request_id)
        with as_call_errors():
            response = self._stub.Cancel(request, **self._options(timeout_s))
        return response.was_running

    def is_serving(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether the server is there and takes calls."""
        request = health_pb2.HealthCheckRequest()
        try:
            found = self._health.Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return found.status == health_pb2.HealthCheckResponse.SERVING
