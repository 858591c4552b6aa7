"""The client's side of bench_wrapper.py, in a process of its own.

    python -m headrace.scripts.wrapper_client '{"protocol": "grpc", ...}'

Takes a `Load` as JSON and prints what it measured as one JSON line. Imports no jax. A
client's cost must not be taken for the server's, so calls are made with little around
them: gRPC's own stub, HTTP by hand.
"""

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

# Not before it is needed: the engine's own process uses Load and measure without it.
Protocol = Literal["engine", "grpc", "http"]
PROMPT = "Once upon a time"
MODEL_NAME = "fixed-step"
_PAUSE_S = (0.01, 0.03)  # between calls one at a time: both processes fall asleep

# Tokens of each piece of one request's output, as they come.
Pieces = Callable[[int], AsyncGenerator[int]]
# A call of the same protocol that asks nothing of the engine.
Empty = Callable[[], Awaitable[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What to send.

    Attributes:
      protocol: over which way.
      address: host:port; empty for "engine".
      streams: at the same time, for the rate.
      tokens: of each of them.
      probes: requests one after the other, for the time to the first token.
    """

    protocol: Protocol
    address: str = ""
    streams: int
    tokens: int
    probes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of a load.

    Attributes:
      tokens: that came, of the streams.
      pieces: messages that brought them.
      seconds: from the first request to the last token of the streams.
      ttft_s: of each probe.
      empty_s: of as many empty calls; what the protocol itself takes.
    """

    tokens: int
    pieces: int
    seconds: float
    ttft_s: list[float]
    empty_s: list[float]


async def measure(load: Load, pieces: Pieces, empty: Empty) -> Measured:
    """Sends a load; `pieces(n)` makes a request for n tokens."""

    async def whole() -> tuple[int, int]:
        counts = [count async for count in pieces(load.tokens)]
        return sum(counts), len(counts)

    async for _ in pieces(2):
        pass  # connects
    begin_s = time.perf_counter()
    found = await asyncio.gather(*(whole() for _ in range(load.streams)))
    seconds = time.perf_counter() - begin_s
    ttft_s, empty_s, rng = [], [], random.Random(1)
    for _ in range(load.probes):
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        ttft_s.append(await _first(pieces(2)))
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        begin_s = time.perf_counter()
        await empty()
        empty_s.append(time.perf_counter() - begin_s)
    return Measured(
        tokens=sum(tokens for tokens, _ in found),
        pieces=sum(count for _, count in found),
        seconds=seconds,
        ttft_s=ttft_s,
        empty_s=empty_s,
    )


async def _first(pieces: AsyncGenerator[int]) -> float:
    """Seconds to the first token; the rest is awaited, so that the engine is idle."""
    begin_s, first_s = time.perf_counter(), None
    async for count in pieces:
        if first_s is None and count:
            first_s = time.perf_counter() - begin_s
    assert first_s is not None, "a request without a token"
    return first_s


def sampling(tokens: int) -> dict[str, Any]:
    """Parameters by the names that both protocols share."""
    return {"max_tokens": tokens, "temperature": 0.0}


async def over_grpc(load: Load) -> Measured:
    """Measures Generate."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from headrace.engine.serving.proto import generation_pb2 as pb
    from headrace.engine.serving.proto import generation_pb2_grpc as stubs

    async with grpc.aio.insecure_channel(load.address) as channel:
        stub = stubs.GenerationServiceStub(channel)
        health = health_pb2_grpc.HealthStub(channel)

        async def pieces(tokens: int) -> AsyncGenerator[int]:
            params = pb.SamplingParams(**sampling(tokens))
            request = pb.GenerateRequest(text=PROMPT, params=params)
            async for response in stub.Generate(request):
                yield sum(len(one.token_ids) for one in response.completions)

        async def empty() -> None:
            await health.Check(health_pb2.HealthCheckRequest())

        return await measure(load, pieces, empty)


async def over_http(load: Load) -> Measured:
    """Measures /v1/completions; a letter is a token."""
    from headrace.scripts import http_stream_client as http

    async def pieces(tokens: int) -> AsyncGenerator[int]:
        fields = {"model": MODEL_NAME, "prompt": PROMPT, "stream": True}
        async with http.opened(load.address) as call:
            fields |= sampling(tokens)
            await call.send(http.request("/v1/completions", fields))
            status = await call.head()
            if status != 200:
                raise ConnectionError(f"status {status}")
            async with contextlib.aclosing(call.events()) as events:
                async for event in events:
                    if event is not None:
                        yield sum(len(one["text"]) for one in event["choices"])

    async def empty() -> None:
        async with http.opened(load.address) as call:
            await call.send(http.request("/health", method="GET"))
            await call.head()

    return await measure(load, pieces, empty)


_WAYS: dict[str, Callable[[Load], Awaitable[Measured]]] = {
    "grpc": over_grpc,
    "http": over_http,
}


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    load = Load(**json.loads(argv[1]))
    measured = asyncio.run(_WAYS[load.protocol](load))
    print(json.dumps(dataclasses.asdict(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
