"""gRPC servers for tests: within an event loop, or in a thread of their own."""

import asyncio
import contextlib
import dataclasses
import threading

import grpc

from headrace import LLM
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.serving.grpc_server import GrpcServer
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs
from headrace.engine.serving.server_options import ServerOptions
from headrace.engine.serving.service import GenerationService

GREEDY = {"temperature": 0, "ignore_eos": True}


def request(text="abc", **params):
    """Six greedy tokens, unless `params` says otherwise."""
    params = {**GREEDY, "max_tokens": 6} | params
    return pb.GenerateRequest(text=text, params=pb.SamplingParams(**params))


def long_request(text="abc", **fields):
    """400 tokens, so that something can happen meanwhile."""
    message = request(text, max_tokens=400)
    message.MergeFrom(pb.GenerateRequest(**fields))
    return message


@contextlib.asynccontextmanager
async def front(service, **options):
    """(server, stub) of a healthy gRPC server before a service."""
    server = GrpcServer(service, ServerOptions(port=0, **options))
    await server.start()
    await server.set_healthy(service.is_ready)
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield server, stubs.GenerationServiceStub(channel)
    finally:
        await server.stop(0)


async def refusal(call):
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call was served")


async def idle_gauges(service):
    """The engine's gauges once nothing runs; waits for a second at most."""
    for _ in range(100):
        gauges = (await service.engine.stats())["gauges"]
        if not gauges["num_requests_running"] and not service.num_calls:
            break
        await asyncio.sleep(0.01)
    return gauges


class ServerThread:
    """A server whose calls may be made from the test's own thread.

    Args:
      checkpoint, config: of the engine.
      **service_options: of GenerationService.
    """

    def __init__(self, checkpoint, config, **service_options):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        llm = LLM.from_checkpoint(checkpoint, config=config)
        self.run(self._start(llm, service_options))

    def run(self, coroutine):
        """Has the server's event loop run something."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(60)

    def stats(self):
        return self.run(self.service.engine.stats())

    def close(self):
        self.run(self.server.stop(0))
        self.run(self.service.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _start(self, llm, service_options):
        self.service = GenerationService(
            AsyncLLM(llm), model_name="tiny", **service_options
        )
        await self.service.start()
        self.server = GrpcServer(self.service, ServerOptions(port=0))
        await self.server.start()
        await self.server.set_healthy(True)
        self.address = self.server.address


@contextlib.contextmanager
def server_thread(checkpoint, llm, *, engine=None, **service_options):
    """A ServerThread with the config of an engine, closed at the end."""
    config = dataclasses.replace(llm.engine_config, **(engine or {}))
    thread = ServerThread(checkpoint, config, **service_options)
    try:
        yield thread
    finally:
        thread.close()
