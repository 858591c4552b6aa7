"""Keys, tenants, and what a call is told when there is no place for it."""

import asyncio
import json
import time

import grpc
import pytest
from grpc_calls import front, long_request, refusal, request

from headrace.client import CallError, Client
from headrace.engine.serving.grpc_guard import PUSHBACK, pushback_ms
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.tenants import KeyFile, hash_of

CODE = grpc.StatusCode


@pytest.fixture
def key_file(tmp_path):
    tenants = {
        "acme": {"keys": [hash_of("k1")], "requests_per_minute": 2},
        "other": {"keys": [hash_of("k2")]},
    }
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return KeyFile(path)


def test_keys_are_asked_for_everything_but_health(serve, key_file):
    async def main(service):
        async with front(service) as (server, stub):
            for header in ("", "Bearer", "Bearer k3", "Basic k1", "k1"):
                metadata = [("authorization", header)] if header else []
                for method in (stub.GenerateOnce, stub.Generate):
                    call = method(request(), metadata=metadata)
                    call = call if method is stub.GenerateOnce else call.read()
                    error = await refusal(call)
                    assert error.code() is CODE.UNAUTHENTICATED
            info = stub.ModelInfo(pb.ModelInfoRequest())
            assert (await refusal(info)).code() is CODE.UNAUTHENTICATED
            return await asyncio.to_thread(use, server.address)

    def use(address):
        with Client(address, "k1") as one, Client(address, "k2") as two:
            assert one.is_serving() and Client(address).is_serving()
            stream = one.stream("a", request_id="r", max_tokens=400, ignore_eos=True)
            next(stream)
            assert not two.cancel("r") and one.cancel("r")
            list(stream)
            one.generate("a", max_tokens=1)
            with pytest.raises(CallError) as error:
                one.generate("a", max_tokens=1)
            two.generate("a", max_tokens=1)
        return error.value

    error = serve(main, keys=key_file)
    assert error.code == "RESOURCE_EXHAUSTED" and "requests_per_minute" in error.message
    assert 20 < error.retry_after_s <= 30


def test_too_many_calls_are_told_when_to_come_back(serve):
    """gRPC's own retry policy waits as long as the server says, and is served."""
    policy = {
        "maxAttempts": 3, "initialBackoff": "0.01s", "maxBackoff": "0.01s",
        "backoffMultiplier": 1, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }  # fmt: skip
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}

    async def main(service):
        async with front(service, max_concurrent_calls=1) as (server, stub):
            running = stub.Generate(long_request(request_id="r"))
            await running.read()
            error = await refusal(stub.GenerateOnce(request()))
            assert error.code() is CODE.RESOURCE_EXHAUSTED
            hints = dict(error.trailing_metadata())
            options = [("grpc.service_config", json.dumps(config))]
            async with grpc.aio.insecure_channel(server.address, options) as channel:
                start_s = time.monotonic()
                retried = stubs.GenerationServiceStub(channel).GenerateOnce(request())
                # Cancel takes no place of the one.
                assert (await stub.Cancel(pb.CancelRequest(request_id="r"))).was_running
                output = await retried
                return hints, output, time.monotonic() - start_s

    hints, output, waited_s = serve(main)
    assert hints[PUSHBACK] == "1000" and output.finished
    assert 0.9 < waited_s < 20


def test_a_full_queue_is_told_likewise(serve):
    async def main(service):
        async with front(service) as (_, stub):
            running = [stub.Generate(long_request())]
            await running[0].read()  # before the next: the queue has one place
            running.append(stub.Generate(long_request()))
            while not (await service.engine.stats())["gauges"]["num_requests_waiting"]:
                await asyncio.sleep(0.01)
            error = await refusal(stub.GenerateOnce(long_request()))
            for call in running:
                call.cancel()
            return error

    error = serve(main, engine={"max_queued_requests": 1, "num_pages": 33})
    assert error.code() is CODE.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata())[PUSHBACK] == "1000"


@pytest.mark.parametrize("share_queue", [True, False])
def test_a_flood_of_one_key_leaves_places_for_another(serve, key_file, share_queue):
    """Without sharing the other tenant is refused, too: the queue is one tenant's."""

    async def main(service):
        async with front(service) as (_, stub):
            flood = [("authorization", "Bearer k2")]
            calls = [
                stub.Generate(long_request(), metadata=flood) for _ in range(1 + 12)
            ]
            ends = [asyncio.ensure_future(call.code()) for call in calls]
            waiting = 4 if share_queue else 8
            while sum(end.done() for end in ends) < 12 - waiting:
                await asyncio.sleep(0.01)
            assert {await end for end in ends if end.done()} == {
                CODE.RESOURCE_EXHAUSTED
            }
            good = stub.GenerateOnce(
                request(), metadata=[("authorization", "Bearer k1")]
            )
            if not share_queue:
                return (await refusal(good)).code()
            return len((await good).completions)

    engine = {
        "max_queued_requests": 8, "num_pages": 33, "share_queue": share_queue,
        "policy": "fair",
    }  # fmt: skip
    found = serve(main, engine=engine, keys=key_file)
    assert found == (1 if share_queue else CODE.RESOURCE_EXHAUSTED)


def test_a_long_wait_still_fits_what_grpc_reads():
    assert pushback_ms(0.0001) == 1 and pushback_ms(10**9) == 2**31 - 1
