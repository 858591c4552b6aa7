"""A service over the two-layer model, in an event loop of its own."""

import asyncio
import dataclasses
import shutil
import subprocess

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


@pytest.fixture(scope="session")
def pem(tmp_path_factory):
    """name -> path: a CA, server and client certificates of it, and another CA's."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("pem")

    def openssl(*arguments):
        subprocess.run(
            ["openssl", *arguments], cwd=folder, check=True, capture_output=True
        )

    for ca in ("ca", "other_ca"):
        _self_signed(openssl, ca)
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other_ca")):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj",
            f"/CN={name}",
        )  # fmt: skip
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey",
            f"{ca}.key", "-CAcreateserial", "-out", f"{name}.pem", "-days", "2",
            "-extfile", "names",
        )  # fmt: skip
    return {path.name: str(path) for path in folder.iterdir()}


def _self_signed(openssl, name):
    openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
        "-subj", f"/CN={name}",
    )  # fmt: skip
