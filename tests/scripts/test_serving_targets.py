"""Targets: a server over gRPC or HTTP, or an engine: requests counted the same."""

import asyncio
import functools
import json
import sys

import httpx
import pytest
from grpc_calls import front
from http_clients import running

from headrace import LLM
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.serving.prometheus import exposition
from headrace.engine.serving.service import GenerationService
from headrace.engine.serving.tenants import KeyFile, hash_of
from headrace.scripts.serving_http import Chunks, HttpTarget
from headrace.scripts.serving_load import Load
from headrace.scripts.serving_targets import (
    EngineTarget,
    GrpcTarget,
    RequestFailed,
    check_end,
    read_page,
)
from headrace.scripts.serving_workloads import Shape, synthetic

ITEMS = synthetic("20:9", 4, Shape(), vocab_size=512, seed=1)


@pytest.fixture
def on_server(tiny_llm, tiny_checkpoint):
    """on_server(main): runs `await main(grpc address, URL)` before a fresh engine."""

    async def whole(main, **options):
        config = tiny_llm.engine_config
        engine = AsyncLLM(LLM.from_checkpoint(tiny_checkpoint, config=config))
        metrics = functools.partial(exposition, engine, model_name="tiny")
        try:
            service = GenerationService(engine, model_name="tiny", **options)
            await service.start()
            async with front(service) as (server, _):
                async with running(service, metrics=metrics) as url:
                    return await main(server.address, url)
        finally:
            await engine.close()

    def run(main, **options):
        return asyncio.run(asyncio.wait_for(whole(main, **options), 120))

    return run


async def records_of(target, items=ITEMS, **options):
    """(records, messages) of requests sent at once; the target is closed."""
    load = Load(target, **options)
    try:
        return await load.run(items, [0.0] * len(items)), load.messages
    finally:
        await target.close()


def check_all_came(records):
    assert [record.status for record in records] == ["ok"] * 4
    assert [record.output_tokens for record in records] == [9] * 4
    assert [record.prompt_tokens for record in records] == [20] * 4
    for record in records:
        times_s = [record.sent_s, *(time_s for time_s, _ in record.events)]
        assert times_s == sorted(times_s) and times_s[-1] <= record.ended_s


def test_grpc_requests_are_counted_token_by_token(on_server):
    async def main(address, url):
        target = GrpcTarget(address, metrics_url=f"{url}/metrics")
        facts, before = await target.facts(), await target.counters()
        records, _ = await records_of(target)
        return facts, before, records, await target.counters()

    facts, before, records, after = on_server(main)
    assert (facts.model, facts.max_context_len) == ("tiny", 512)
    assert (facts.vocab_size, facts.num_slots) == (512, None)
    check_all_came(records)
    assert after["generation_tokens"] - before["generation_tokens"] == 36


def test_http_requests_are_counted_token_by_token(on_server):
    async def main(address, url):
        target = HttpTarget(f"{url}/v1/")
        facts, before = await target.facts(), await target.counters()
        records, _ = await records_of(target)
        after = await asyncio.to_thread(read_page, f"{url}/metrics")
        return facts, before, records, after

    facts, before, records, after = on_server(main)
    assert (facts.model, facts.max_context_len) == ("tiny", 512)
    check_all_came(records)
    assert after["generation_tokens"] - before["generation_tokens"] == 36


def test_engine_in_process_is_counted_token_by_token(tiny_llm, tiny_checkpoint):
    async def main():
        config = tiny_llm.engine_config
        llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
        target = EngineTarget(llm, model="mine")
        facts, before = await target.facts(), await target.counters()
        records = await Load(target).run(ITEMS, [0.0] * 4)
        after = await target.counters()
        await target.close()
        return facts, before, records, after

    facts, before, records, after = asyncio.run(main())
    assert (facts.model, facts.max_context_len) == ("mine", 512)
    assert (facts.vocab_size, facts.num_slots) == (512, 12)
    check_all_came(records)
    assert after["generation_tokens"] - before["generation_tokens"] == 36


def test_refused_requests_have_the_servers_reason(on_server):
    items = synthetic("600:9", 1, Shape(), vocab_size=512, seed=1)

    async def main(address, url):
        http = HttpTarget(url, model="tiny")
        return await records_of(GrpcTarget(address), items), await records_of(
            http, items
        )

    (grpc, grpc_told), (http, http_told) = on_server(main)
    assert [record.status for record in grpc] == ["INVALID_ARGUMENT"]
    assert [record.status for record in http] == ["HTTP 400"]
    for told in (grpc_told, http_told):
        assert "511" in next(iter(told.values()))


def test_keys_open_a_server_that_wants_them(on_server, tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(f'{{"tenants": {{"a": {{"keys": ["{hash_of("secret")}"]}}}}}}')

    async def main(address, url):
        found = []
        for key in ("secret", None):
            for make in (GrpcTarget, HttpTarget):
                where = address if make is GrpcTarget else url
                target = make(where, key=key)
                try:
                    found.append((await target.facts()).model)
                except RequestFailed as error:
                    found.append(error.reason)
                await target.close()
        return found

    assert on_server(main, keys=KeyFile(path)) == [
        "tiny", "tiny", "UNAUTHENTICATED", "HTTP 401"
    ]  # fmt: skip


def test_a_server_that_is_not_there_is_a_failure_of_the_request():
    async def main():
        http = HttpTarget("http://127.0.0.1:9", model="tiny")
        with pytest.raises(RequestFailed, match="/v1/models"):
            await http.facts()
        assert await http.counters() is None
        return await records_of(http, ITEMS[:1]), await records_of(
            GrpcTarget("127.0.0.1:9"), ITEMS[:1]
        )

    (http, _), (grpc, _) = asyncio.run(main())
    assert http[0].status == "ConnectError" and grpc[0].status == "UNAVAILABLE"


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_other_servers_are_asked_in_openais_words(ignore_eos):
    """A server without a running usage, whose chunks have several tokens."""
    asked = []

    def answer(request):
        asked.append((request.url.path, json.loads(request.content)))
        lines = [chunk("a b"), chunk(" c d"), chunk(" e", reason="length")]
        lines += [chunk(None, usage(5)), "data: [DONE]"]
        return httpx.Response(200, text="\n\n".join(lines))

    async def main():
        target = HttpTarget("http://there", model="m", ignore_eos=ignore_eos)
        target._client = httpx.AsyncClient(
            transport=httpx.MockTransport(answer), base_url="http://there"
        )
        return await records_of(
            target, synthetic("3:5", 1, Shape(), vocab_size=9, seed=0)
        )

    ((record,), _) = asyncio.run(main())
    (path, body), *_ = asked
    assert path == "/v1/completions" and len(asked) == 1
    assert len(body.pop("prompt")) == 3
    assert body.pop("stream_options")["include_usage"] is True
    assert body.pop("ignore_eos", False) == ignore_eos
    assert body == {"model": "m", "max_tokens": 5, "temperature": 0, "stream": True}
    assert record.is_ok and record.prompt_tokens == 5
    assert [tokens for _, tokens in record.events] == [1, 2, 2]


def chunk(text, usage=None, reason=None):
    """One event of a stream of completions."""
    choices = [{"index": 0, "text": text, "finish_reason": reason}]
    body = {"choices": choices if text is not None else [], "usage": usage}
    return f"data: {json.dumps(body)}"


def usage(tokens):
    return {"prompt_tokens": 5, "completion_tokens": tokens}


def test_running_usage_counts_tokens_and_not_chunks():
    chunks = Chunks()
    lines = [
        chunk("a", usage(1)),
        "",
        ": ping",
        chunk("", usage(4)),
        chunk("b", usage(6)),
    ]
    pieces = [chunks.take(line) for line in lines]
    assert [piece and piece.tokens for piece in pieces] == [1, None, None, 3, 2]
    assert pieces[0].prompt_tokens == 5
    chunks.take(chunk("", usage(6), "length"))
    chunks.take(chunk(None, usage(6)))
    chunks.take("data: [DONE]")
    assert (chunks.end().tokens, chunks.end().total_tokens) == (0, None)


def test_without_running_usage_a_chunk_is_a_token_until_the_sum_is_told():
    chunks = Chunks()
    lines = [chunk("a"), chunk(""), chunk("b", reason="stop"), chunk(None, usage(7))]
    pieces = [chunks.take(line) for line in lines]
    assert [piece and piece.tokens for piece in pieces] == [1, 0, 1, None]
    chunks.take("data: [DONE]")
    assert (chunks.end().total_tokens, chunks.end().prompt_tokens) == (7, 5)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (['data: {"error": {"code": 503, "message": "x"}}'], "stream error 503"),
        (["data: {"], "malformed stream"),
        (["data: 5"], "malformed stream"),
        ([chunk("a", {"completion_tokens": 1})], "malformed stream"),
        ([chunk("a", usage(1))], "cut off"),
        ([chunk("a", reason="length")], "cut off"),
        ([chunk("a"), "data: [DONE]"], "cut off"),
        ([chunk("a", reason="abort"), "data: [DONE]"], "abort"),
    ],
)
def test_streams_that_break_off_are_failures(lines, reason):
    chunks = Chunks()
    with pytest.raises(RequestFailed) as error:
        for line in lines:
            chunks.take(line)
        chunks.end()
    assert error.value.reason == reason


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "error", None])
def test_outputs_that_were_given_up_are_failures(reason):
    with pytest.raises(RequestFailed) as error:
        check_end(reason)
    assert error.value.reason == (reason or "cut off")
    check_end("length"), check_end("stop")


def test_addresses_that_are_none_of_http_are_refused():
    for make in (
        lambda: HttpTarget("127.0.0.1:8000"),
        lambda: HttpTarget("http://a", metrics_url="file:///etc/passwd"),
        lambda: GrpcTarget("a:1", metrics_url="a/metrics"),
    ):
        with pytest.raises(ValueError, match="must be http://... or https://"):
            make()


def test_without_httpx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ValueError, match="pip install httpx"):
        HttpTarget("http://a")
