"""What the HTTP front refuses, and in which words: OpenAI's, with the right status."""

import asyncio
import json

import openai
import pytest
from http_clients import SharedServer, http_client, openai_client, told, until_idle

from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.tenants import KeyFile, hash_of

MESSAGES = [{"role": "user", "content": "hi"}]
SECRET = "a secret that no message may quote"


def _keys(tmp_path, **tenants):
    """A key file: name -> limits, the key is the name."""
    path = tmp_path / "keys.json"
    entries = {n: {"keys": [hash_of(n)], **limits} for n, limits in tenants.items()}
    path.write_text(json.dumps({"tenants": entries}))
    return KeyFile(path)


# Body, and the parameter that is to blame.
TEXT_FAULTS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, None),
    ({"prompt": [SECRET] * 129}, "prompt"),
    ({"prompt": [SECRET, 1]}, "prompt"),
    ({"prompt": [[1], [[2]]]}, "prompt"),
    ({"prompt": [1, 999_999]}, None),
    ({"prompt": "\ud800"}, None),
    ({"prompt": SECRET * 10_000}, None),
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"n": 17}, "n"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"echo": True}, "echo"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"guided_json": {}}, None),
    ({"\ud800": 1}, None),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": True, "max_tokens": 10**6}, "max_tokens"),
    ({"stream": True, "prompt": ["a", SECRET * 10_000]}, None),
    ({"response_format": {"type": "yaml"}}, "response_format"),
]
CHAT_FAULTS = [
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "robot", "content": SECRET}]}, "messages"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": SECRET * 10_000}]}, None),
    ({"prompt": SECRET}, None),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
]


@pytest.fixture(scope="module")
def server(tiny_llm, chat_checkpoint):
    """One server for the many refusals."""
    server = SharedServer(chat_checkpoint, tiny_llm.engine_config)
    yield server
    server.close()


def _num_generated(server):
    stats = server.run(server.service.engine.stats())
    return stats["counters"]["generation_tokens"]


CASES = [("/v1/completions", {"prompt": SECRET}, *fault) for fault in TEXT_FAULTS]
CASES += [("/v1/chat/completions", {"messages": MESSAGES}, *f) for f in CHAT_FAULTS]


@pytest.mark.parametrize("path, own, fault, param", CASES, ids=lambda x: str(x)[:50])
def test_wrong_values_are_named_and_nothing_is_run(server, path, own, fault, param):
    before = _num_generated(server)
    body = json.dumps({"model": "tiny", **own, **fault}).encode()
    answer = server.ask("POST", path, body)
    error = told(answer, secret=SECRET)
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param and error["message"].startswith(param), error
    assert server.run(until_idle(server.service))
    # Not even a right prompt beside a wrong one.
    assert _num_generated(server) == before


def test_routes_methods_and_types_aretold(server):
    answer = server.ask("GET", "/v2/anything")
    assert answer.status_code == 404 and told(answer)["message"]
    assert server.ask("GET", "/v1/models/").status_code == 404
    assert server.ask("GET", "/metrics").status_code == 404
    answer = server.ask("GET", "/v1/completions")
    assert answer.status_code == 405 and told(answer)["message"]
    assert answer.headers["allow"] == "POST"
    answer = server.ask("POST", "/v1/completions", b"{}", kind="text/plain")
    assert answer.status_code == 415 and told(answer)["message"]
    body = json.dumps({"model": "gpt-9", "prompt": "a"}).encode()
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status_code == 404
    error = told(answer)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert server.ask("GET", "/v1/models/other").status_code == 404


def test_openais_client_raises_its_own_errors(serve, tmp_path):
    keys = _keys(tmp_path, rich={}, poor={"requests_per_minute": 1})

    async def main(service):
        async with openai_client(service, key="rich") as client:
            ask = client.completions.create
            poor = client.with_options(api_key="poor").completions.create
            right = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            stranger = client.with_options(api_key="stranger")
            for call, wanted in (
                (ask(model="tiny", prompt=""), openai.BadRequestError),
                (ask(model="other", prompt="a"), openai.NotFoundError),
                (stranger.models.list(), openai.AuthenticationError),
                (stranger.completions.create(**right), openai.AuthenticationError),
            ):
                with pytest.raises(wanted) as error:
                    await call
                assert error.value.body["message"]
            assert error.value.code == "invalid_api_key"
            assert error.value.response.headers["www-authenticate"] == "Bearer"
            await poor(**right)
            with pytest.raises(openai.RateLimitError) as error:
                await poor(**right)
            assert 50 <= int(error.value.response.headers["retry-after"]) <= 60
            with pytest.raises(openai.BadRequestError) as error:
                await poor(**right | {"prompt": ["a", "b"]})
            assert error.value.param == "prompt"
            await ask(**right)
            service.is_draining = True
            with pytest.raises(openai.InternalServerError) as error:
                await ask(**right)
            assert error.value.status_code == 503
            assert int(error.value.response.headers["retry-after"]) >= 1

    serve(main, keys=keys)


def test_keys_are_asked_for_before_the_body_and_not_for_health(serve, tmp_path):
    async def main(service):
        async with http_client(service) as client:
            kind = {"content-type": "application/json"}
            for key in (
                None,
                "Bearer x",
                "Basic acme",
                "acme",
                "Bearer",
                "Bearer \xe4",
            ):
                headers = kind | (
                    {"authorization": key.encode("latin-1")} if key else {}
                )
                for path in ("/v1/completions", "/v1/chat/completions"):
                    answer = await client.post(path, content=b"{", headers=headers)
                    assert answer.status_code == 401 and told(answer)["message"]
                assert (
                    await client.get("/v1/models", headers=headers)
                ).status_code == 401
                assert (await client.get("/health", headers=headers)).status_code == 200
            headers = {"authorization": "bearer  acme"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    serve(main, keys=_keys(tmp_path, acme={}))


@pytest.mark.parametrize(
    "fault, status",
    [
        (ServiceError("permission_denied", "not yours"), 403),
        (ServiceError("resource_exhausted", "full", retry_after_s=1.2), 429),
        (ServiceError("unavailable", "starting"), 503),
        (ServiceError("unimplemented", "no"), 501),
        (RuntimeError(SECRET), 500),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_faults_have_their_status_and_no_internals(fault, status, is_stream, caplog):
    answer = asyncio.run(_faulty(fault, 0, is_stream))
    assert answer.status_code == status and told(answer)
    retries = {429: "2", 503: "1"}
    assert answer.headers.get("retry-after") == retries.get(status)
    assert SECRET not in caplog.text
    assert ("RuntimeError" in caplog.text) == (status == 500)


def test_a_fault_within_a_stream_is_its_last_event(caplog):
    answer = asyncio.run(_faulty(RuntimeError(SECRET), 2, True))
    *pieces, last, end = answer.text.split("\n\n")
    assert answer.status_code == 200 and end == "" and len(pieces) == 2
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert SECRET not in answer.text + caplog.text

    async def ask():
        async with openai_client(_Faulty(RuntimeError(SECRET), 2)) as client:
            stream = await client.completions.create(
                model="tiny", prompt=SECRET, stream=True
            )
            texts = []
            with pytest.raises(openai.APIError):
                async for chunk in stream:
                    texts.append(chunk.choices[0].text)
            return texts

    assert asyncio.run(ask()) == ["x", "x"]


class _Faulty:
    """A service that yields `count` pieces and fails."""

    model_name, is_ready, is_draining = "tiny", True, False

    def __init__(self, fault, count):
        self._fault, self._count = fault, count

    def tenant_of(self, key):
        from headrace.engine.serving.tenants import ANONYMOUS

        return ANONYMOUS

    async def stream(self, tenant, call):
        from headrace.engine.outputs import CompletionOutput, RequestOutput

        for _ in range(self._count):
            yield RequestOutput(
                request_id="r", prompt=None, prompt_token_ids=[1], finished=False,
                outputs=[CompletionOutput(text="x", token_ids=[1])],
            )  # fmt: skip
        raise self._fault


async def _faulty(fault, count, is_stream):
    async with http_client(_Faulty(fault, count)) as client:
        body = {"model": "tiny", "prompt": SECRET, "stream": is_stream}
        return await client.post("/v1/completions", json=body)
