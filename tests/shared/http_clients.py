"""The HTTP front on a port of its own, and OpenAI's client before it."""

import asyncio
import contextlib

import httpx
import openai
import uvicorn

from headrace import LLM, SamplingParams
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.serving.http_front import make_app
from headrace.engine.serving.service import GenerationService

# What the tests ask most, in OpenAI's words and the engine's.
GREEDY = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_TEXT = "[user] hi\n[assistant] "  # by the template of conftest.py


def from_engine(llm, prompt, params=PARAMS):
    """What the engine itself answers."""
    return llm.generate(prompt, params, use_tqdm=False)[0]


@contextlib.asynccontextmanager
async def running(service, **options):
    """Yields the URL of a server over `service`, in this event loop."""
    app = make_app(service, **options)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_level="error", lifespan="off"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # Ctrl-C is pytest's
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 20)


@contextlib.asynccontextmanager
async def openai_client(service, *, key="any", **options):
    """Yields OpenAI's own client of a server over `service`."""
    async with (
        running(service, **options) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60
        ) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def http_client(service, **options):
    """Yields a plain HTTP client of a server over `service`."""
    async with (
        running(service, **options) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def running_requests(service):
    """Requests that hold a slot, waiting ones too, once they stop changing."""
    gauges = (await service.engine.stats())["gauges"]
    return gauges["num_requests_running"] + gauges["num_requests_waiting"]


async def until_idle(service, seconds=5.0):
    """Waits until no request is in the engine; False where some stay."""
    for _ in range(int(seconds / 0.01)):
        if await running_requests(service) == 0:
            return True
        await asyncio.sleep(0.01)
    return False


class SharedServer:
    """A server that many tests ask, in an event loop of its own.

    Args:
      checkpoint, config: of the engine.
      limits: of the service.
      **options: of `make_app`.
    """

    def __init__(self, checkpoint, config, *, limits=None, **options):
        self._loop = asyncio.new_event_loop()
        self.run = self._loop.run_until_complete
        self._engine = AsyncLLM(LLM.from_checkpoint(checkpoint, config=config))
        self.run(self._start(limits, options))

    async def _start(self, limits, options):
        self._stack = contextlib.AsyncExitStack()
        self.service = GenerationService(self._engine, model_name="tiny", limits=limits)
        await self.service.start()
        enter = self._stack.enter_async_context
        self.url = await enter(running(self.service, **options))
        self.http = await enter(httpx.AsyncClient(base_url=self.url, timeout=60))
        self.openai = await enter(
            openai.AsyncOpenAI(
                base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60
            )
        )

    def ask(self, method, path, body=b"", kind="application/json"):
        """A plain request's answer."""
        headers = {"content-type": kind}
        return self.run(self.http.request(method, path, content=body, headers=headers))

    def close(self):
        """Ends all of it."""
        self.run(self._stack.aclose())
        self.run(self._engine.close())
        self._loop.close()


def told(answer, *, secret=None):
    """An error answer's fields, checked for OpenAI's shape, and for what it quotes."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert secret is None or secret not in answer.text
    return error
