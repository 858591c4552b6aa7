"""The service's methods over gRPC: messages in, messages out, on grpc.aio.

`grpc_guard.py` stands before them: it knows who calls, and makes statuses of what they
raise. A call that its client ends or whose deadline passes is cancelled by gRPC; that
closes the iteration here, and the engine drops the request before its next step.
"""

import contextlib
from typing import TYPE_CHECKING, Any

import headrace
from headrace.engine.serving.grpc_convert import read_call, read_pair, write_output
from headrace.engine.serving.grpc_guard import bearer_key
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.tenants import Tenant

if TYPE_CHECKING:
    from headrace.engine.serving.service import GenerationService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationFront(stubs.GenerationServiceServicer):
    """Generate, GenerateOnce, Score, Tokenize, ModelInfo, Cancel.

    Args:
      service: does the work. Methods raise what it raises: ServiceError.
    """

    def __init__(self, service: "GenerationService") -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Writes a response per piece of output."""
        call = read_call(request, self._service.limits)
        outputs = self._service.stream(self._tenant(context), call)
        # Not a generator: gRPC would leave one that it cancels to the collector.
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await context.write(write_output(output))

    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: Any
    ) -> pb.GenerateResponse:
        """The whole output."""
        call = read_call(request, self._service.limits)
        return write_output(await self._service.generate(self._tenant(context), call))

    async def Score(self, request: pb.ScoreRequest, context: Any) -> pb.ScoreResponse:
        """How likely a continuation is."""
        prompt, continuation = read_pair(request)
        found = await self._service.score(self._tenant(context), prompt, continuation)
        return pb.ScoreResponse(
            token_ids=found.token_ids,
            logprobs=found.logprobs,
            ranks=found.ranks,
            logprob=found.logprob,
            is_greedy=found.is_greedy,
        )

    async def Tokenize(
        self, request: pb.TokenizeRequest, context: Any
    ) -> pb.TokenizeResponse:
        """Token ids of a text, as Generate reads it."""
        ids = await self._service.tokenize(request.text)
        return pb.TokenizeResponse(token_ids=ids)

    async def ModelInfo(
        self, request: pb.ModelInfoRequest, context: Any
    ) -> pb.ModelInfoResponse:
        """What is served."""
        llm = self._service.engine.llm
        template = llm.tokenizer and llm.tokenizer.chat_template
        return pb.ModelInfoResponse(
            model_name=self._service.model_name,
            version=headrace.__version__,
            max_context_tokens=llm.engine_config.max_context_len,
            vocab_size=llm.model_config.vocab_size,
            has_tokenizer=llm.tokenizer is not None,
            has_chat_template=template is not None,
            scores=llm.engine_config.scoring,
            numerics=llm.engine_config.numerics,
        )

    async def Cancel(
        self, request: pb.CancelRequest, context: Any
    ) -> pb.CancelResponse:
        """Ends a running request of the same tenant with what it has."""
        was = self._service.cancel(self._tenant(context), request.request_id)
        return pb.CancelResponse(was_running=was)

    def _tenant(self, context: Any) -> Tenant:
        return self._service.tenant_of(bearer_key(context.invocation_metadata()))
