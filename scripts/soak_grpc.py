"""The calls of a soak over gRPC: good ones, cut short ones, wrong ones.

Each is `await kind(client, rng)` and returns its status, see soak_tally.py.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.scripts.soak_client import GrpcClient, ended

SERVICE = "/headrace.v1.GenerationService"
CANARY = (7, 77, 277, 17, 117)
LONG_CALL = 480  # tokens


def long_call(client: GrpcClient) -> Any:
    """A call that runs for long, always the same; see `GrpcClient.read`."""
    params = pb.SamplingParams(max_tokens=LONG_CALL, temperature=0.0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=CANARY[::-1]), params=params)
    return client.begin(request)


async def canary(client: GrpcClient, rng: random.Random) -> str:
    params = pb.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    ids = pb.TokenIds(ids=CANARY)
    request = pb.GenerateRequest(token_ids=ids, params=params)
    request.uses_cache = rng.random() < 0.5
    return await client.ask("canary", request)


async def stream(client: GrpcClient, rng: random.Random) -> str:
    return await client.ask(*client.question(rng))


async def once(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    stub = stubs.GenerationServiceStub(client.channel)
    try:
        response = await stub.GenerateOnce(request, metadata=client.metadata())
    except grpc.aio.AioRpcError as error:
        return error.code().name
    for one in response.completions:
        client.tally.compare((number, one.index), one.token_ids)
    return ended({one.finish_reason for one in response.completions})


async def disconnect(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    if rng.random() < 0.5:
        return await client.ask(number, request, stop_after=rng.randint(1, 20))
    call = client.begin(request)
    asyncio.get_running_loop().call_later(rng.uniform(0, 2), call.cancel)
    return await client.read(number, call)


async def channel_dropped(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    channel = client.new_channel()
    call = stubs.GenerationServiceStub(channel).Generate(
        request, metadata=client.metadata()
    )
    reading = asyncio.ensure_future(client.read(number, call))
    await asyncio.wait([reading], timeout=rng.uniform(0, 3))
    await channel.close()
    return await reading


async def call_deadline(client: GrpcClient, rng: random.Random) -> str:
    return await client.ask(*client.question(rng), timeout_s=rng.uniform(0.005, 3))


async def deadline_s(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    request.deadline_s = rng.uniform(0.001, 3)
    return await client.ask(number, request)


async def queue_timeout_s(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    request.queue_timeout_s = rng.uniform(0.001, 2)
    return await client.ask(number, request)


async def cancel(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    request.request_id = f"soak-{rng.getrandbits(64):x}"
    stub = stubs.GenerationServiceStub(client.channel)
    call = client.begin(request)
    reading = asyncio.ensure_future(client.read(number, call))
    await asyncio.wait([reading], timeout=rng.uniform(0, 2))
    wanted = pb.CancelRequest(request_id=request.request_id)
    # It may not have arrived yet; then it must be cancelled once it has.
    while not reading.done():
        await stub.Cancel(wanted, metadata=client.metadata())
        await asyncio.wait([reading], timeout=1)
    return await reading


async def limited_tenant(client: GrpcClient, rng: random.Random) -> str:
    return await client.ask(*client.question(rng), tenant="limited")


async def wrong_value(client: GrpcClient, rng: random.Random) -> str:
    number, request = client.question(rng)
    _SPOIL[rng.randrange(len(_SPOIL))](request)
    return await client.ask(number, request)


_SPOIL: Sequence[Callable[[pb.GenerateRequest], object]] = (
    lambda r: setattr(r.params, "temperature", -1.0),
    lambda r: setattr(r.params, "temperature", float("nan")),
    lambda r: setattr(r.params, "max_tokens", 10**6),
    lambda r: setattr(r.params, "max_tokens", 0),
    lambda r: setattr(r.params, "n", 1000),
    lambda r: setattr(r, "deadline_s", -1.0),
    lambda r: setattr(r, "deadline_s", float("nan")),
    lambda r: setattr(r, "queue_timeout_s", float("inf")),
    lambda r: setattr(r, "request_id", "two\nlines"),
    lambda r: setattr(r, "text", "a text, and no tokenizer"),
    lambda r: r.token_ids.ids.append(10**6),
    lambda r: r.token_ids.ids.append(-1),
    lambda r: r.token_ids.ids.extend([1] * 4000),
    lambda r: r.ClearField("prompt"),
    lambda r: setattr(r.params.structured_outputs, "json", "{"),
)


async def _raw(
    client: GrpcClient, method: str, message: bytes, key: str | None = None
) -> str:
    call = client.channel.unary_stream(f"{SERVICE}/{method}")
    metadata = client.metadata()
    if key is not None:
        metadata = (("authorization", f"Bearer {key}"),)
    try:
        async for _ in call(message, metadata=metadata):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK:nothing"


async def malformed(client: GrpcClient, rng: random.Random) -> str:
    # No field has the number 0, so nothing that begins so is a message.
    junk = b"\x00" + rng.randbytes(rng.randint(0, 200))
    return await _raw(client, "Generate", junk)


async def oversized(client: GrpcClient, rng: random.Random) -> str:
    return await _raw(client, "Generate", bytes(2**17 + rng.randint(0, 2**17)))


async def wrong_key(client: GrpcClient, rng: random.Random) -> str:
    _, request = client.question(rng)
    key = rng.choice(["", "hr-nobody", "x" * 2000])
    return await _raw(client, "Generate", request.SerializeToString(), key)


async def unknown_method(client: GrpcClient, _: random.Random) -> str:
    return await _raw(client, "Nothing", b"")


Kind = Callable[[GrpcClient, random.Random], Awaitable[str]]

# Kind -> (share of all calls in percent, how). Disconnects are 30 with HTTP's.
KINDS: Mapping[str, tuple[int, Kind]] = {
    "grpc stream": (14, stream),
    "grpc once": (3, once),
    "grpc disconnect": (14, disconnect),
    "grpc channel dropped": (5, channel_dropped),
    "grpc call deadline": (5, call_deadline),
    "grpc deadline_s": (5, deadline_s),
    "grpc queue_timeout_s": (3, queue_timeout_s),
    "grpc cancel": (4, cancel),
    "grpc limited tenant": (3, limited_tenant),
    "grpc wrong value": (3, wrong_value),
    "grpc malformed": (3, malformed),
    "grpc oversized": (2, oversized),
    "grpc wrong key": (2, wrong_key),
    "grpc unknown method": (1, unknown_method),
}
