"""The service behind the fronts: admission, limits, ends, drains, on two layers."""

import asyncio
import contextlib

import pytest

from headrace import SamplingParams
from headrace.engine.serving.calls import Call
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.service import GenerationService
from headrace.engine.serving.tenants import ANONYMOUS, KeyFile, Tenant, hash_of

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
ACME, OTHER = Tenant(name="acme"), Tenant(name="other")


class Records(list):
    """An observer that keeps everything."""

    on_call = list.append


async def _code(call):
    """The code that a call is refused with."""
    with pytest.raises(ServiceError) as refused:
        await call
    return refused.value.code


async def _stats(service):
    return (await service.engine.stats())["gauges"]


def test_streams_equal_the_engine_and_are_observed_once(serve, text_llm):
    wanted = text_llm.generate("abc", SHORT, use_tqdm=False)[0].outputs[0]
    records = Records()

    async def main(service):
        call = Call(prompt="abc", params=SHORT, request_id="mine")
        pieces = [piece async for piece in service.stream(ACME, call)]
        whole = await service.generate(ACME, Call(prompt="abc", params=SHORT))
        return pieces, whole

    pieces, whole = serve(main, observers=[records])
    assert {piece.request_id for piece in pieces} == {"mine"}
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    told = [t for p in pieces for t in p.outputs[0].token_ids]
    assert told == whole.outputs[0].token_ids == wanted.token_ids
    assert "".join(p.outputs[0].text for p in pieces) == wanted.text
    assert len(records) == 2 and records[0].request_id == "mine"
    for record in records:
        assert (record.tenant, record.method, record.code) == ("acme", "generate", "ok")
        assert (record.num_prompt_tokens, record.num_output_tokens) == (2, 6)
        assert record.finish_reason == "length"
        times = [record.arrival_s, record.admitted_s, record.first_token_s]
        assert times == sorted(times) and times[-1] <= record.finished_s


def test_conversations_go_through_the_template(serve, text_llm):
    messages = [{"role": "user", "content": "hi"}]
    text = "[user] hi\n[assistant] "

    async def main(service):
        chat = await service.generate(ACME, Call(messages=messages, params=SHORT))
        ids = await service.tokenize(text)
        return chat, ids

    chat, ids = serve(main)
    assert list(chat.prompt_token_ids) == list(ids)


@pytest.mark.parametrize(
    "call",
    [
        Call(),
        Call(prompt="a", messages=[]),
        Call(prompt=""),
        Call(prompt="x" * 51),
        Call(prompt=[1] * 41),
        Call(prompt="xy" * 25),  # few characters, too many tokens
        Call(prompt=[10**6]),
        Call(prompt=["a"]),
        Call(messages=[{"role": "user", "content": "a"}] * 3),
        Call(messages=[{"role": "user", "content": "a" * 60}]),
        Call(messages=["a"]),
        Call(messages="a"),
        Call(prompt="a", deadline_s=0.0),
        Call(prompt="a", deadline_s=1e9),
        Call(prompt="a", deadline_s=float("nan")),
        Call(prompt="a", queue_timeout_s=-1.0),
        Call(prompt="a", params=SamplingParams(n=3)),
        Call(prompt="a", params=SamplingParams(max_tokens=21)),
        Call(prompt="a", params=SamplingParams(logprobs=4)),
        Call(prompt="a", params=SamplingParams(logprobs=-1)),
        Call(prompt="a", params=SamplingParams(stop=["a"] * 3)),
        Call(prompt="a", params=SamplingParams(stop="a" * 9)),
        Call(prompt="a", params=SamplingParams(logit_bias={1: 1.0, 2: 1.0})),
        Call(prompt="a", params=SamplingParams(allowed_token_ids=[1, 2])),
        Call(prompt="a", params=SamplingParams(structured_outputs={"regex": "a" * 31})),
    ],
    ids=lambda call: str(call)[:60],
)
def test_too_much_is_refused_before_any_device_work(call, shared_service):
    steps = shared_service.stats()["histograms"]["iteration_tokens_total"]["count"]
    assert shared_service.code(call) == "invalid_argument"
    after = shared_service.stats()["histograms"]["iteration_tokens_total"]["count"]
    assert after == steps


@pytest.fixture(scope="module")
def shared_service(text_llm, tiny_llm, chat_checkpoint):
    """One service for the many refusals, with small limits."""
    from headrace import LLM
    from headrace.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    engine = AsyncLLM(
        LLM.from_checkpoint(chat_checkpoint, config=tiny_llm.engine_config)
    )
    limits = ServiceLimits(
        max_prompt_tokens=40, max_prompt_chars=50, max_messages=2, max_tokens=20,
        max_n=2, max_logprobs=3, max_stop_strings=2, max_stop_chars=8,
        max_bias_entries=1, max_grammar_chars=30, max_deadline_s=60,
    )  # fmt: skip

    async def make():
        service = GenerationService(engine, model_name="tiny", limits=limits)
        await service.start()
        return service

    service = loop.run_until_complete(make())

    class Shared:
        def code(self, call):
            return loop.run_until_complete(_code(service.generate(ACME, call)))

        def stats(self):
            return loop.run_until_complete(engine.stats())

    yield Shared()
    loop.run_until_complete(engine.close())
    loop.close()


def test_a_caller_that_goes_away_frees_its_slot_and_pages(serve):
    records = Records()

    async def main(service):
        before = await _stats(service)
        outputs = service.stream(ACME, Call(prompt="abc", params=LONG))
        async with contextlib.aclosing(outputs):
            async for _ in outputs:
                break
        for _ in range(100):
            after = await _stats(service)
            if after["num_requests_running"] == 0:
                break
            await asyncio.sleep(0.01)
        assert after["num_requests_running"] == 0 == service.num_calls
        # Pages of a prompt may stay in the cache; none is held.
        assert after["kv_cache_usage_perc"] == before["kv_cache_usage_perc"]
        assert service.gate.num_running("acme") == 0

    serve(main, observers=[records])
    assert [record.code for record in records] == ["cancelled"]


def test_cancel_ends_only_requests_of_its_own_tenant(serve):
    async def main(service):
        call = Call(prompt="abc", params=LONG, request_id="r1")
        outputs = service.stream(ACME, call)
        await anext(outputs)
        assert await _code(service.generate(ACME, call)) == "invalid_argument"
        assert not service.cancel(OTHER, "r1") and not service.cancel(ACME, "r2")
        assert service.cancel(ACME, "r1")
        *_, last = [output async for output in outputs]
        assert not service.cancel(ACME, "r1")
        return last.outputs[0].finish_reason

    assert serve(main) == "cancelled"


def test_a_deadline_ends_with_what_there_is(serve):
    async def main(service):
        call = Call(prompt="abc", params=LONG, deadline_s=0.05)
        return await service.generate(ACME, call)

    output = serve(main)
    assert output.outputs[0].finish_reason == "deadline"
    assert 0 <= len(output.outputs[0].token_ids) < 400


def test_a_full_queue_and_a_spent_tenant_say_when_to_come_back(serve):
    poor = Tenant(name="poor", requests_per_minute=1)
    busy = Tenant(name="busy", max_concurrent=1)
    small = Tenant(name="small", tokens_per_minute=20)

    async def refused(call):
        with pytest.raises(ServiceError) as error:
            await call
        assert error.value.code == "resource_exhausted"
        return error.value.retry_after_s

    async def main(service):
        call = Call(prompt="abc", params=SHORT)
        await service.generate(poor, call)
        assert 50 < await refused(service.generate(poor, call)) <= 60
        outputs = service.stream(busy, Call(prompt="abc", params=LONG))
        await anext(outputs)
        assert await refused(service.generate(busy, call)) > 0
        await outputs.aclose()
        await service.generate(busy, call)
        # 8 tokens each: what a request did not use comes back.
        await service.generate(small, call)
        await service.generate(small, call)
        assert await refused(service.generate(small, call)) > 0
        whole = Call(prompt="abc", params=LONG)
        assert await _code(service.generate(small, whole)) == "invalid_argument"
        # The pool holds one request of 400 tokens, and the queue one more.
        running = service.stream(ACME, whole)
        await anext(running)
        waiting = asyncio.create_task(service.generate(ACME, whole))
        while (await _stats(service))["num_requests_waiting"] == 0:
            await asyncio.sleep(0.01)
        assert await refused(service.generate(ACME, whole)) > 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.aclose()

    serve(main, engine={"max_queued_requests": 1, "num_pages": 33})


def test_drain_refuses_new_calls_and_waits_for_running_ones(serve):
    async def main(service):
        outputs = service.stream(ACME, Call(prompt="abc", params=SHORT))
        await anext(outputs)
        draining = asyncio.create_task(service.drain(60))
        await asyncio.sleep(0)
        assert await _code(service.generate(ACME, Call(prompt="abc"))) == "unavailable"
        *_, last = [output async for output in outputs]
        await draining
        return last.outputs[0].finish_reason

    assert serve(main) == "length"


def test_drain_ends_what_outlives_the_grace(serve):
    async def main(service):
        outputs = service.stream(ACME, Call(prompt="abc", params=LONG))
        await anext(outputs)
        draining = asyncio.create_task(service.drain(0.01))
        *_, last = [output async for output in outputs]
        await draining
        return last.outputs[0]

    output = serve(main)
    assert output.finish_reason == "cancelled" and len(output.token_ids) < 400


def test_scores_equal_the_engines(serve, text_llm):
    wanted = text_llm.score("abc", "de", use_tqdm=False)[0]

    async def main(service):
        found = await service.score(ACME, "abc", "de")
        assert await _code(service.score(ACME, "abc", "")) == "invalid_argument"
        return found

    found = serve(main)
    assert found.token_ids == wanted.token_ids
    assert found.logprobs == wanted.logprobs and found.ranks == wanted.ranks


def test_nobody_is_served_before_the_first_step(text_llm):
    service = GenerationService(None, model_name="tiny")
    assert asyncio.run(_code(service.generate(ANONYMOUS, Call(prompt="a")))) == (
        "unavailable"
    )


def test_keys_tell_tenants(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(f'{{"tenants": {{"acme": {{"keys": ["{hash_of("k1")}"]}}}}}}')
    service = GenerationService(None, model_name="tiny", keys=KeyFile(path))
    assert service.needs_key and service.tenant_of("k1").name == "acme"
    for key in (None, "", "k2", "k" * 10**6):
        with pytest.raises(ServiceError) as error:
            service.tenant_of(key)
        assert error.value.code == "unauthenticated"
    assert GenerationService(None, model_name="t").tenant_of(None) is ANONYMOUS
