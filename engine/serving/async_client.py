"""`Client` for asyncio. Imports no jax."""

from collections.abc import AsyncGenerator, Sequence
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


class AsyncClient(Caller):
    """`Client` for asyncio: the same methods, awaited, in one event loop."""

    grpc_kind = grpc.aio

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs, and the connection."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt = None,
        params: Params = None,
        *,
        messages: Messages = None,
        token_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> GenerateResult:
        """The whole output of a prompt; see `Client.generate`."""
        request = generate_request(prompt, messages, token_ids, params, options)
        with as_call_errors():
            response = await self._stub.GenerateOnce(
                request, **self._options(timeout_s)
            )
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
    ) -> AsyncGenerator[GenerateResult]:
        """Pieces of a prompt's output as they come; see `Client.stream`.

        Close the iterator (`contextlib.aclosing`) or cancel its task to end the
        request on the server.
        """
        request = generate_request(prompt, messages, token_ids, params, options)
        return self._pieces(request, self._options(timeout_s))

    async def _pieces(
        self, request: pb.GenerateRequest, options: dict[str, Any]
    ) -> AsyncGenerator[GenerateResult]:
        call = self._stub.Generate(request, **options)
        try:
            with as_call_errors():
                async for response in call:
                    yield generate_result(response)
        finally:
            call.cancel()

    async def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> ScoreResult:
        """How likely a continuation is; see `Client.score`."""
        request = score_request(prompt, continuation)
        with as_call_errors():
            return score_result(
                await self._stub.Score(request, **self._options(timeout_s))
            )

    async def tokenize(self, text: str, *, timeout_s: float | None = None) -> list[int]:
        """Token ids of a text; see `Client.tokenize`."""
        request = pb.TokenizeRequest(text=text)
        with as_call_errors():
            response = await self._stub.Tokenize(request, **self._options(timeout_s))
        return list(response.token_ids)

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        """What is served; see `Client.model_info`."""
        request = pb.ModelInfoRequest()
        with as_call_errors():
            return model_info(
                await self._stub.ModelInfo(request, **self._options(timeout_s))
            )

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends one of the caller's requests; see `Client.cancel`."""
        request = pb.CancelRequest(request_id=request_id)
        with as_call_errors():
            response = await self._stub.Cancel(request, **self._options(timeout_s))
        return response.was_running

    async def is_serving(self, *, timeout_s: float | None = 5.0) -> bool:
        """Whether the server is there and takes calls."""
        request = health_pb2.HealthCheckRequest()
        try:
            found = await self._health.Check(request, timeout=timeout_s)
        except grpc.RpcError:
            return False
        return found.status == health_pb2.HealthCheckResponse.SERVING
