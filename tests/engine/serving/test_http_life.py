"""Callers who go away, servers that shut down, and what watches them."""

import asyncio
import json

import httpx
import pytest
from http_clients import http_client, running_requests, until_idle

from headrace.engine.serving.http_stream import EventStream
from headrace.engine.serving.limits import ServiceLimits

LONG = {
    "model": "tiny", "prompt": "abc", "max_tokens": 400, "temperature": 0,
    "ignore_eos": True,
}  # fmt: skip
CHAT = {k: v for k, v in LONG.items() if k != "prompt"}
CHAT["messages"] = [{"role": "user", "content": "hi"}]


class Records(list):
    """An observer that keeps everything."""

    on_call = list.append


async def _until_running(service, count=1):
    for _ in range(500):
        if await running_requests(service) >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never ran")


async def _held_pages(service):
    return (await service.engine.stats())["gauges"]["kv_cache_usage_perc"]


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", LONG),
    ("/v1/completions", LONG | {"prompt": ["abc", "d"], "n": 2, "temperature": 1}),
    ("/v1/chat/completions", CHAT),
])  # fmt: skip
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_caller_who_goes_away_frees_slot_and_pages(serve, path, body, is_stream):
    records = Records()

    async def main(service):
        async with http_client(service) as client:
            before = await _held_pages(service)
            asked = client.post(path, json=body | {"stream": is_stream})
            task = asyncio.create_task(asked)
            await _until_running(service)
            assert await _held_pages(service) > before
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            steps = (await service.engine.stats())["counters"]
            assert await until_idle(service)
            after = (await service.engine.stats())["counters"]
            assert service.num_calls == 0 == service.gate.num_running("anonymous")
            assert await _held_pages(service) == before
            assert (await client.get("/health")).status_code == 200
        # Far from its end: 400 tokens each would have come.
        return after["generation_tokens"] - steps["generation_tokens"]

    assert serve(main, observers=[records]) < 200
    assert {r.code for r in records} == {"cancelled"}
    assert len(records) == (2 if isinstance(body.get("prompt"), list) else 1)


def test_a_caller_who_takes_nothing_is_given_up():
    ended = []

    async def events():
        try:
            for i in range(10**6):
                yield {"piece": i}
        finally:
            ended.append(True)

    async def main():
        async def send(message):
            sent.append(message["type"])
            if len(sent) > 5:
                await asyncio.Event().wait()  # the sockets' buffers are full

        sent, receive = [], asyncio.Event().wait  # nobody hangs up
        stream = EventStream(events(), None, headers={}, stall_s=0.05)
        await asyncio.wait_for(stream({}, receive, send), 5)
        return sent

    body = "http.response.body"
    assert asyncio.run(main()) == ["http.response.start", *[body] * 5]
    assert ended == [True]


def test_pieces_arrive_before_the_end(serve):
    async def main(service):
        async with http_client(service) as client:
            body = LONG | {"stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    assert line.startswith('data: {"id":"cmpl-')
                    return await running_requests(service)

    assert serve(main) == 1


def test_draining_turns_health_and_ends_streams_with_an_error(serve):
    async def main(service):
        async with http_client(service) as client:
            assert (await client.get("/health")).status_code == 200
            asked = LONG | {"stream": True}
            stream = asyncio.create_task(client.post("/v1/completions", json=asked))
            whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await _until_running(service, 2)
            draining = asyncio.create_task(service.drain(0.05))
            await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            await draining
            return await stream, await whole

    stream, whole = serve(main)
    last = stream.text.split("\n\n")[-2]
    assert stream.status_code == 200 and "[DONE]" not in stream.text
    assert (
        "the server ended"
        in json.loads(last.removeprefix("data: "))["error"]["message"]
    )
    assert whole.status_code == 503


def test_health_is_bad_until_the_first_step(serve):
    async def main(service):
        async with http_client(service) as client:
            service.is_ready = False
            before = (await client.get("/health")).status_code
            service.is_ready = True
            return before, (await client.get("/health")).status_code

    assert serve(main) == (503, 200)


def test_metrics_are_passed_on(serve):
    kind = "text/plain; version=0.0.4; charset=utf-8"

    async def main(service):
        async def metrics():
            return b"up 1\n", kind

        async with http_client(service, metrics=metrics) as client:
            return await client.get("/metrics")

    answer = serve(main)
    assert (answer.status_code, answer.content) == (200, b"up 1\n")
    assert answer.headers["content-type"] == kind


def test_limits_of_the_service_hold(serve):
    async def main(service):
        async with http_client(service) as client:
            right = await client.post("/v1/completions", json=LONG | {"max_tokens": 5})
            wrong = await client.post("/v1/completions", json=LONG | {"max_tokens": 6})
            return right.status_code, wrong

    right, wrong = serve(main, limits=ServiceLimits(max_tokens=5))
    assert (right, wrong.status_code) == (200, 400)
    assert wrong.json()["error"]["message"] == "max_tokens must be at most 5, got 6"


def test_a_full_queue_is_told_by_429(serve):
    async def main(service):
        async with http_client(service) as client:
            body = LONG | {"prompt": ["a"] * 60}  # more than slots and queue
            answer = await client.post("/v1/completions", json=body)
            assert await until_idle(service)
            return answer

    answer = serve(main, engine={"max_queued_requests": 1})
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


def test_records_have_the_id_that_the_answer_has(serve):
    records = Records()

    async def main(service):
        async with http_client(service) as client:
            body = LONG | {"max_tokens": 2}
            answers = [
                await client.post("/v1/completions", json=body | {"prompt": prompt})
                for prompt in ("a", ["b", "c"])
            ]
            return [answer.headers["x-request-id"] for answer in answers]

    one, two = serve(main, observers=[records])
    assert [r.request_id for r in records][0] == one
    assert {r.request_id for r in records[1:]} == {f"{two}-0", f"{two}-1"}


def test_bounds_must_be_above_zero():
    from headrace.engine.serving.http_front import make_app

    for wrong in ({"max_body_bytes": 0}, {"stall_s": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            make_app(None, **wrong)


def test_answers_are_ascii_whatever_callers_send(serve):
    async def main(service):
        async with http_client(service) as client:
            text = '{"model": "\\ud800\u2028", "prompt": "a"}'
            kind = {"content-type": "application/json"}
            url = "/v1/completions"
            return await client.post(url, content=text.encode(), headers=kind)

    answer: httpx.Response = serve(main)
    assert answer.status_code == 404 and answer.content.isascii()
