"""A whole server in the test's event loop: both fronts, signals, a failed engine."""

import asyncio
import os
import signal

import httpx
import pytest

from headrace import LLM
from headrace.client import AsyncClient, CallError
from headrace.engine.serving.server import serve
from headrace.engine.serving.server_options import ServerOptions

LONG = dict(max_tokens=480, temperature=0, ignore_eos=True)


@pytest.fixture
def run_server(tiny_llm, chat_checkpoint):
    """run_server(use, **options): `use` gets the addresses and the engine, then SIGTERM
    comes unless the server has ended.

    Returns the exit code and what `use` returned.
    """

    def run(use, metrics=None, **options):
        llm = LLM.from_checkpoint(chat_checkpoint, config=tiny_llm.engine_config)
        options = ServerOptions(port=0, **options)

        async def whole():
            lines = []
            server = asyncio.create_task(
                serve(llm, options, announce=lines.append, metrics=metrics)
            )
            while len(lines) < 1 + (options.http_port is not None):
                await asyncio.sleep(0.01)
                assert not server.done(), await server
            found = await use([line.split()[-1] for line in lines], llm)
            if not server.done():
                os.kill(os.getpid(), signal.SIGTERM)
            return await server, found

        return asyncio.run(asyncio.wait_for(whole(), 60))

    return run


def test_both_fronts_serve_the_same_and_end_with_sigterm(run_server):
    async def use(addresses, llm):
        grpc, http = addresses
        async with AsyncClient(grpc) as client, httpx.AsyncClient() as web:
            one = await client.generate("abc", max_tokens=6, temperature=0)
            body = {"model": "m", "prompt": "abc", "max_tokens": 6, "temperature": 0}
            url = f"http://{http}"
            other = await web.post(f"{url}/v1/completions", json=body, timeout=30)
            assert (await web.get(f"{url}/metrics")).text == "x 1\n"
            return one.text, other.json()["choices"][0]["text"]

    async def metrics():
        return b"x 1\n", "text/plain"

    options = dict(http_port=0, model_name="m", metrics=metrics)
    code, (one, other) = run_server(use, **options)
    assert code == 0 and one == other


def test_a_second_signal_ends_the_grace(run_server):
    async def use(addresses, llm):
        async with AsyncClient(addresses[0]) as client:
            call = asyncio.create_task(client.generate("abc", **LONG))
            while not llm._loop.has_work:
                await asyncio.sleep(0.01)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.02)
            return await call

    code, output = run_server(use, grace_s=1000)
    assert code == 0
    assert output.outputs[0].finish_reason == "cancelled" and output.output_tokens < 480


def test_a_failed_engine_ends_the_server_with_an_error(run_server):
    async def use(addresses, llm):
        def fail():
            raise RuntimeError("out of memory")

        llm._loop._runner.read_step = fail
        async with AsyncClient(addresses[0]) as client:
            with pytest.raises(CallError) as error:
                await client.generate("abc", **LONG)
            for _ in range(500):
                if not await client.is_serving(timeout_s=1):
                    return error.value.code
                await asyncio.sleep(0.01)
        return "still serving"

    code, error = run_server(use)
    assert (code, error) == (1, "INTERNAL")
