"""How calls and servers end: clients that go, deadlines, drains, failures, logs."""

import asyncio
import logging
import time

import grpc
import pytest
from grpc_calls import front, idle_gauges, long_request, refusal, request
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client import Client
from headrace.engine.serving.grpc_front import SERVICE_NAME, GenerationFront
from headrace.engine.serving.grpc_server import GrpcServer
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.server import make_service, running
from headrace.engine.serving.server_options import ServerOptions
from headrace.engine.serving.service import GenerationService

CODE = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("how", ["cancels", "closes its channel"])
def test_a_client_that_goes_frees_its_slot_and_pages(how, serve):
    async def main(service):
        async with front(service) as (server, stub):
            before = await idle_gauges(service)
            channel = grpc.aio.insecure_channel(server.address)
            call = stubs.GenerationServiceStub(channel).Generate(long_request())
            await call.read()
            busy = (await service.engine.stats())["gauges"]
            assert busy["num_requests_running"] == 1
            assert busy["kv_cache_usage_perc"] > before["kv_cache_usage_perc"]
            if how == "cancels":
                call.cancel()
            else:
                await channel.close()
            start_s = time.monotonic()
            assert await idle_gauges(service) == before
            assert time.monotonic() - start_s < 1  # the whole takes seconds more
            assert (await stub.GenerateOnce(request())).finished

    serve(main)


def test_a_client_that_goes_before_its_turn_leaves_the_queue(serve):
    async def main(service):
        async with front(service) as (_, stub):
            first = stub.Generate(long_request())
            await first.read()
            waiting = stub.GenerateOnce(long_request())
            while not (await service.engine.stats())["gauges"]["num_requests_waiting"]:
                await asyncio.sleep(0.01)
            waiting.cancel()
            while (await service.engine.stats())["gauges"]["num_requests_waiting"]:
                await asyncio.sleep(0.01)
            assert service.num_calls == 1
            first.cancel()

    serve(main, engine={"num_pages": 33})


def test_the_calls_own_deadline_leaves_what_was_streamed(serve):
    async def main(service):
        async with front(service) as (_, stub):
            call, pieces = stub.Generate(long_request(), timeout=0.3), []
            with pytest.raises(grpc.aio.AioRpcError) as error:
                async for piece in call:
                    pieces.append(piece)
            gauges = await idle_gauges(service)
            once = await refusal(stub.GenerateOnce(long_request(), timeout=0.1))
            await idle_gauges(service)
            return pieces, error.value.code(), once.code(), gauges

    pieces, code, once, gauges = serve(main)
    assert code is once is CODE.DEADLINE_EXCEEDED
    assert pieces and not any(piece.finished for piece in pieces)
    assert gauges["num_requests_running"] == 0


def test_a_requests_deadline_is_no_error(serve):
    async def main(service):
        async with front(service) as (_, stub):
            message = long_request(deadline_s=0.2)
            pieces = [piece async for piece in stub.Generate(message)]
            return pieces, await stub.GenerateOnce(message)

    pieces, once = serve(main)
    for last in (pieces[-1], once):
        assert last.finished
        assert last.completions[0].finish_reason == "deadline"
        assert 0 < last.usage.output_tokens < 400
    assert len(once.completions[0].token_ids) == once.usage.output_tokens


def test_a_request_that_waited_too_long_is_rejected(serve):
    async def main(service):
        async with front(service) as (_, stub):
            first = stub.Generate(long_request())
            await first.read()
            output = await stub.GenerateOnce(long_request(queue_timeout_s=0.05))
            first.cancel()
            return output.completions[0]

    completion = serve(main, engine={"num_pages": 33})
    assert completion.finish_reason == "rejected"
    assert "queue_timeout_s" in completion.finish_message


async def _health(address, name=""):
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=name)
        return (await stub.Check(request)).status


def test_health_follows_the_first_step_and_the_drain(serve):
    async def main(service):
        unready = GenerationService(service.engine, model_name="tiny")
        async with front(unready) as (server, stub):
            for name in ("", SERVICE_NAME):
                assert await _health(server.address, name) == NOT_SERVING
            error = await refusal(stub.GenerateOnce(request()))
            assert error.code() is CODE.UNAVAILABLE
        steps = _num_steps(await service.engine.stats())
        fresh = GenerationService(service.engine, model_name="tiny")
        async with running(fresh, ServerOptions(port=0)) as (server, http):
            assert http is None
            assert _num_steps(await service.engine.stats()) > steps
            for name in ("", SERVICE_NAME):
                assert await _health(server.address, name) == SERVING
            channel = grpc.aio.insecure_channel(server.address)
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
            assert (await watch.read()).status == SERVING
        assert (await watch.read()).status == NOT_SERVING
        await channel.close()

    serve(main)


def _num_steps(stats):
    return stats["histograms"]["iteration_tokens_total"]["count"]


def test_a_failing_engine_is_internal_and_tells_nothing(serve, caplog):
    async def main(service):
        async with front(service) as (_, stub):
            call = stub.Generate(long_request("a secret prompt"))
            await call.read()
            loop = service.engine.llm._loop
            loop._runner.read_step = _fail
            with pytest.raises(grpc.aio.AioRpcError) as error:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert service.engine.has_failed
            later = await refusal(stub.GenerateOnce(request()))
            return error.value, later

    error, later = serve(main)
    assert error.code() is CODE.INTERNAL
    assert later.code() in (CODE.UNAVAILABLE, CODE.INTERNAL)
    for one in (error, later):
        assert "device 0x7" not in one.details()
    assert "device 0x7" in caplog.text and "secret" not in caplog.text


def _fail():
    raise RuntimeError("device 0x7 is on fire")


def test_a_fault_of_ours_is_logged_without_what_it_says(serve, caplog, monkeypatch):
    async def broken(self, request, context):
        raise ValueError(f"cannot do {request.text}")

    monkeypatch.setattr(GenerationFront, "GenerateOnce", broken)

    async def main(service):
        async with front(service) as (_, stub):
            error = await refusal(stub.GenerateOnce(request("a secret prompt")))
            return error, await stub.Tokenize(pb.TokenizeRequest(text="a"))

    error, _ = serve(main)
    assert error.code() is CODE.INTERNAL
    assert "secret" not in error.details() + caplog.text
    assert "in broken" in caplog.text and "ValueError" in caplog.text


@pytest.mark.parametrize("mode", ["none", "redacted", "full"])
def test_prompts_are_logged_only_as_asked(mode, serve, caplog):
    caplog.set_level(logging.DEBUG)

    async def main(service):
        logged = make_service(service.engine, ServerOptions(log_prompts=mode, port=0))
        await logged.start()
        async with front(logged) as (server, _):
            await asyncio.to_thread(use, server.address)

    def use(address):
        with Client(address, timeout_s=60) as client:
            client.generate("Marker 42, é!", max_tokens=2)
            messages = [{"role": "user", "content": "Marker\n43"}]
            list(client.stream(messages=messages, max_tokens=2))
            client.score("Marker", "44")
            client.tokenize("Marker 45")

    serve(main)
    lines = [r.getMessage() for r in caplog.records if r.name == "headrace.prompts"]
    if mode == "none":
        assert "Marker" not in caplog.text and lines == []
    elif mode == "redacted":
        assert "Marker" not in caplog.text and "43" not in "".join(lines)
        assert "'xxxxxx 00, x!'" in lines[0] and r"'xxxxxx\n00'" in lines[1]
    else:
        assert "'Marker 42, é!'" in lines[0] and r"'Marker\n43'" in lines[1]
    assert all("\n" not in line for line in lines)


def test_a_port_that_is_taken_is_an_error(serve):
    async def main(service):
        async with front(service) as (server, _):
            with pytest.raises(OSError, match="cannot listen"):
                GrpcServer(service, ServerOptions(port=server.port))

    serve(main)
