"""A service over the two-layer model, in an event loop of its own."""

import asyncio
import dataclasses

import pytest
from http_clients import SharedServer

from headrace import LLM
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.serving.service import GenerationService

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="session")
def chat_checkpoint(tiny_checkpoint, byte_tokenizer):
    """Two layers, bytes as tokens, a chat template."""
    spec = dataclasses.replace(byte_tokenizer, chat_template=TEMPLATE)
    return dataclasses.replace(tiny_checkpoint, tokenizer=spec)


@pytest.fixture(scope="module")
def asked(tiny_llm, chat_checkpoint):
    """asked(ask): what `await ask(client)` gives, `client` being OpenAI's own."""
    server = SharedServer(chat_checkpoint, tiny_llm.engine_config)
    yield lambda ask: server.run(ask(server.openai))
    server.close()


@pytest.fixture
def serve(tiny_llm, chat_checkpoint):
    """serve(main, **options): runs `await main(service)` over an engine made anew.

    `engine` in the options changes its config.
    """

    def run(main, *, engine=None, **options):
        async def whole():
            config = dataclasses.replace(tiny_llm.engine_config, **(engine or {}))
            running = AsyncLLM(LLM.from_checkpoint(chat_checkpoint, config=config))
            try:
                service = GenerationService(running, model_name="tiny", **options)
                await service.start()
                return await main(service)
            finally:
                await running.close()

        return asyncio.run(asyncio.wait_for(whole(), timeout=120))

    return run
