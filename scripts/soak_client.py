"""A soak's connection over gRPC: its questions, and how an answer is read.

The questions are a fixed set, so every answer can be held against the others to the
same question: tokens depend on nobody's company.
"""

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import grpc

from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.scripts.soak_tally import Tally

_NUM_QUESTIONS, _LONGEST = 64, 120
# Without it all channels to one address share a connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


class GrpcClient:
    """One connection of a tenant, and what is asked over it.

    Args:
      address: host:port.
      keys: bearer key by tenant.
      tenant: whose connection it is.
      tally: compares answers.
      vocab_size: of the model.
    """

    def __init__(
        self,
        address: str,
        keys: Mapping[str, str],
        tenant: str,
        tally: Tally,
        vocab_size: int,
    ) -> None:
        self.address, self.tenant, self._keys = address, tenant, keys
        self.tally, self._vocab_size = tally, vocab_size
        self.channel = self.new_channel()

    def new_channel(self) -> grpc.aio.Channel:
        """A connection of its own."""
        return grpc.aio.insecure_channel(self.address, _OPTIONS)

    def metadata(self, tenant: str | None = None) -> tuple[tuple[str, str], ...]:
        """The bearer key of a tenant."""
        key = self._keys[tenant or self.tenant]
        return (("authorization", f"Bearer {key}"),)

    def question(self, rng: random.Random) -> tuple[int, pb.GenerateRequest]:
        """One of a fixed set of requests, whose answers must always agree."""
        number = rng.randrange(_NUM_QUESTIONS)
        fixed = random.Random(number)
        # Some share their beginning, and so their pages.
        head = [1 + fixed.randrange(4)] * (32 if fixed.random() < 0.5 else 0)
        length = fixed.randint(1, _LONGEST - len(head))
        ids = [fixed.randrange(1, self._vocab_size) for _ in range(length)]
        params = pb.SamplingParams(max_tokens=fixed.randint(1, 160), temperature=0)
        if fixed.random() < 0.6:
            params.temperature, params.seed = 0.8, number
            params.n = fixed.choice([1, 1, 1, 2])
        if fixed.random() < 0.2:
            params.logprobs = 2
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=head + ids), params=params
        )
        request.uses_cache = rng.random() < 0.8
        return number, request

    def begin(
        self,
        request: pb.GenerateRequest,
        *,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """A call of Generate, for `read`.

        Args:
          request: what is asked.
          tenant: another than the connection's.
          timeout_s: the call's own deadline.
        """
        stub = stubs.GenerationServiceStub(self.channel)
        return stub.Generate(request, metadata=self.metadata(tenant), timeout=timeout_s)

    async def ask(
        self,
        number: object,
        request: pb.GenerateRequest,
        *,
        stop_after: int | None = None,
        **options: Any,
    ) -> str:
        """Begins a call and reads it."""
        call = self.begin(request, **options)
        return await self.read(number, call, stop_after)

    async def read(
        self, number: object, call: Any, stop_after: int | None = None
    ) -> str:
        """Reads a call to its end and compares what came; returns its status.

        Args:
          number: of the question.
          call: of `begin`.
          stop_after: messages after which we cancel it.
        """
        texts: dict[int, list[int]] = {}
        count, reasons = 0, set()
        try:
            async for response in call:
                for one in response.completions:
                    texts.setdefault(one.index, []).extend(one.token_ids)
                    if one.HasField("finish_reason"):
                        reasons.add(one.finish_reason)
                count += 1
                if count == stop_after:
                    call.cancel()
            status = ended(reasons)
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # not the call: it hangs, and is given up
            status = "CANCELLED"
        for index, ids in texts.items():
            self.tally.compare((number, index), ids)
        return status


def ended(reasons: set[str]) -> str:
    """Of several completions that which tells most."""
    for reason in ("error", "cancelled", "deadline", "rejected", "length", "stop"):
        if reason in reasons:
            return f"OK:{reason}"
    return "OK:nothing"
