"""Bodies of all kinds before the HTTP front: broken, random, too large, endless."""

import asyncio
import json

import httpx
import hypothesis
import pytest
from http_clients import SharedServer, told
from hypothesis import strategies as st

from headrace.engine.serving.limits import ServiceLimits

MESSAGES = [{"role": "user", "content": "hi"}]
MAX_BYTES, STALL_S = 600_000, 0.5
KIND = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tiny_llm, chat_checkpoint):
    """A server with small bounds; it has to outlive all of this."""
    server = SharedServer(
        chat_checkpoint,
        tiny_llm.engine_config,
        limits=ServiceLimits(max_tokens=64),
        max_body_bytes=MAX_BYTES,
        stall_s=STALL_S,
    )
    yield server
    server.close()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"model": "tiny\xff"}',
        b'{"model": NaN}', b'{"a": 1e999}', b'{"a": Infinity}', b"[" * 10**5,
        b'{"a":' * 70 + b"1" + b"}" * 70, b'{"a": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "a"} x', b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_told_so(server, body):
    answer = server.ask("POST", "/v1/completions", body)
    assert answer.status_code == 400
    assert told(answer)["message"].startswith("the body: ")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
    ),
    max_leaves=6,
)
_FIELDS = [
    "allowed_token_ids", "bad_words", "best_of", "echo", "frequency_penalty",
    "logprobs", "ignore_eos", "logit_bias", "max_completion_tokens", "max_tokens",
    "messages", "min_p", "min_tokens", "model", "n", "presence_penalty", "prompt",
    "seed", "stop", "response_format", "stop_token_ids", "stream", "stream_options",
    "suffix", "tools", "structured_outputs", "temperature", "top_k", "top_logprobs",
    "top_p", "user",
]  # fmt: skip
_RIGHT = st.sampled_from(
    [
        {"temperature": 0, "max_tokens": 2}, {"n": 2, "max_tokens": 2},
        {"logprobs": 1, "max_tokens": 2}, {"stop": ["a"], "max_tokens": 3},
        {"stream": True, "max_tokens": 2}, {"max_tokens": 1}, {},
    ]
)  # fmt: skip


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    is_chat=st.booleans(),
    right=_RIGHT,
    wrong=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=2),
)
def test_any_json_gets_an_answer_that_is_no_failure(server, is_chat, right, wrong):
    own = {"messages": MESSAGES} if is_chat else {"prompt": "ab"}
    body = json.dumps({"model": "tiny", **own, **right, **wrong}).encode()
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    answer = server.ask("POST", path, body)
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        told(answer)
    elif (right | wrong).get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.binary(max_size=60), place=st.integers(0, 60))
def test_any_bytes_get_an_answer_that_is_no_failure(server, data, place):
    body = b'{"model": "tiny", "prompt": "ab", "max_tokens": 1, "user": "someone"}'
    for text in (data, body[:place] + data + body[place:], body[:place]):
        answer = server.ask("POST", "/v1/completions", text)
        assert answer.status_code in (200, 400, 404), answer.text
    assert server.ask("GET", "/health").status_code == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(server, is_chunked):
    async def pieces(body):
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    async def ask(size):
        body = b'{"model": "tiny", "prompt": "ab", "max_tokens": 1'
        body += b" " * (size - len(body) - 1) + b"}"
        content = pieces(body) if is_chunked else body
        return await server.http.post("/v1/completions", content=content, headers=KIND)

    assert server.run(ask(MAX_BYTES)).status_code == 200
    for size in (MAX_BYTES + 1, MAX_BYTES * 19 // 10):
        answer = server.run(ask(size))
        assert answer.status_code == 413
        assert f"{MAX_BYTES} bytes" in told(answer)["message"]


def test_who_sends_without_end_is_cut_off(server):
    sent = 0

    async def endless():
        nonlocal sent
        while sent < 300_000_000:
            sent += 65_536
            yield b" " * 65_536

    async def ask():
        return await server.http.post(
            "/v1/completions", content=endless(), headers=KIND
        )

    try:
        assert server.run(ask()).status_code == 413
    except httpx.TransportError:
        pass  # cut off before it looked for an answer
    assert sent < 50_000_000
    assert server.ask("GET", "/health").status_code == 200


def test_who_stops_sending_istold(server):
    async def ask():
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
            b"content-type: application/json\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    assert server.run(ask()).startswith(b"HTTP/1.1 408 ")
