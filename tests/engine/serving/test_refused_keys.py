"""Calls without a known key: a line each up to a bound, and all are counted."""

import json
from types import SimpleNamespace

import grpc
import pytest
from grpc_calls import front, refusal, request
from http_clients import http_client

from headrace.engine.serving import access_log
from headrace.engine.serving.calls import CallRecord
from headrace.engine.serving.prometheus import exposition
from headrace.engine.serving.refusals import TOLD_PER_MINUTE, Refusals
from headrace.engine.serving.tenants import KeyFile, hash_of

WRONG = "a-wrong-key"


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"tenants": {"acme": {"keys": [hash_of("right")]}}}))
    return KeyFile(path)


def test_each_refused_call_has_a_line_with_its_peer_and_no_key(
    serve, key_file, tmp_path
):
    async def main(service):
        async with front(service) as (server, stub):
            header = [("authorization", f"Bearer {WRONG}")]
            await refusal(stub.GenerateOnce(request("secret"), metadata=header))
            await refusal(stub.Generate(request("secret")).read())
            async with grpc.aio.insecure_channel(server.address) as channel:
                await refusal(channel.unary_unary(f"/any/{WRONG}")(b"secret"))
        async with http_client(service) as client:
            client.headers["authorization"] = f"Bearer {WRONG}"
            body = {"prompt": "secret", "model": WRONG}
            paths = ("/v1/completions", "/v1/chat/completions")
            answers = [await client.post(path, json=body) for path in paths]
            answers.append(await client.get(f"/v1/models/{WRONG}"))
            assert [answer.status_code for answer in answers] == [401] * 3
            client.headers["authorization"] = "Bearer right"
            assert (await client.get("/v1/models")).status_code == 200
        return await exposition(
            service.engine, model_name="m", counters=service.counters
        )

    path = tmp_path / "access.jsonl"
    with access_log.opened(str(path)) as log:
        metrics, _ = serve(main, keys=key_file, observers=[log])
    text = path.read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["method"] for line in lines] == [
        "GenerateOnce", "Generate", "other",
        "/v1/completions", "/v1/chat/completions", "/v1/models",
    ]  # fmt: skip
    for line in lines:
        assert (line["code"], line["tenant"]) == ("unauthenticated", None)
        assert "127.0.0.1:" in line["peer"] and line["untold"] == 0
        assert line["output_tokens"] == 0 and line["total_s"] == 0
    assert WRONG not in text and "secret" not in text and "right" not in text
    assert len({line["request_id"] for line in lines}) == 6
    wanted = 'headrace:unauthenticated_calls_total{engine="0",model_name="m"} 6.0'
    assert wanted in metrics.decode().splitlines()


def test_lines_are_bounded_and_the_next_tells_how_many_are_missing():
    now_s, told = [0.0], []
    observer = SimpleNamespace(on_call=told.append)
    refusals = Refusals([observer], clock=lambda: now_s[0])
    for _ in range(1000):
        refusals.note("Generate", "ipv4:10.0.0.1:1")
    assert len(told) == TOLD_PER_MINUTE and refusals.num_calls == 1000
    assert {record.num_untold for record in told} == {0}
    now_s[0] += 60 / TOLD_PER_MINUTE
    refusals.note("Generate", "ipv4:10.0.0.1:1")
    assert told[-1].num_untold == 1000 - TOLD_PER_MINUTE
    refusals.note("Generate", "ipv4:10.0.0.1:1")
    assert len(told) == TOLD_PER_MINUTE + 1 and refusals.num_calls == 1002


def test_lines_of_served_calls_name_no_peer(tmp_path):
    path = tmp_path / "access.jsonl"
    record = CallRecord(
        request_id="1", tenant="a", method="generate", wall_s=0.0, arrival_s=0.0
    )
    with access_log.opened(str(path)) as log:
        log.on_call(record)
    assert {"peer", "untold"}.isdisjoint(json.loads(path.read_text("utf-8")))
