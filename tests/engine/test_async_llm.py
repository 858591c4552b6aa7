"""AsyncLLM on the two-layer model: the same tokens, and nobody waits for anybody."""

import asyncio
import threading

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.prompt_reader import PromptReader
from headrace.engine.prompts import Prompt
from headrace.engine.reader import Reader, tell

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
PROMPTS = [[5 + i, 7, 9 + 3 * i] for i in range(6)]


@pytest.fixture
def engine(tiny_config, tiny_checkpoint):
    """Made anew: closing it is part of what is tested."""
    return AsyncLLM(LLM.from_checkpoint(tiny_checkpoint, config=tiny_config[1]))


def _run(engine, main):
    async def whole():
        try:
            return await main(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(whole(), timeout=120))


def test_streams_and_outputs_equal_those_of_generate(engine, tiny_llm):
    wanted = tiny_llm.generate(PROMPTS, PARAMS, use_tqdm=False)

    async def read(engine, prompt):
        pieces = [piece async for piece in engine.stream(prompt, PARAMS)]
        assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
        return [t for piece in pieces for t in piece.outputs[0].token_ids]

    async def main(engine):
        streamed = await asyncio.gather(*(read(engine, p) for p in PROMPTS[:3]))
        whole = await asyncio.gather(*(engine.generate(p, PARAMS) for p in PROMPTS[3:]))
        await engine.drain()
        return streamed + [o.outputs[0].token_ids for o in whole]

    assert _run(engine, main) == [o.outputs[0].token_ids for o in wanted]


def test_slow_reader_stalls_nobody_and_gets_all_of_its_tokens(engine):
    async def main(engine):
        slow = await engine.add(PROMPTS[0], PARAMS)
        fast = await engine.generate(PROMPTS[1], PARAMS)
        assert fast.finished and len(fast.outputs[0].token_ids) == 12
        return [t async for piece in slow for t in piece.outputs[0].token_ids]

    assert len(_run(engine, main)) == 12


def test_a_text_that_is_long_to_read_keeps_nobody_waiting(engine, monkeypatch):
    real, gate = PromptReader.read, threading.Event()

    def read(self, prompt, params):
        if len(prompt.token_ids) == 1:
            assert gate.wait(60)
        return real(self, prompt, params)

    monkeypatch.setattr(PromptReader, "read", read)
    monkeypatch.setattr(PromptReader, "is_quick", lambda *_: False)

    async def main(engine):
        slow = asyncio.create_task(engine.generate([5], PARAMS))
        fast = await engine.generate(PROMPTS[1], PARAMS)
        assert fast.finished and not slow.done()
        gate.set()
        late = asyncio.create_task(engine.generate([6], PARAMS))
        assert (await slow).finished and (await late).finished
        gate.clear()
        too_late = asyncio.create_task(engine.generate([7], PARAMS))
        await asyncio.sleep(0)
        await engine.drain()
        gate.set()
        with pytest.raises(RuntimeError, match="drains"):
            await too_late

    _run(engine, main)


@pytest.mark.parametrize(
    "prompt, params, is_quick",
    [
        (Prompt(token_ids=[5] * 400), {}, True),
        (Prompt(text="a" * 256), {"stop": ["x"]}, True),
        (Prompt(text="a" * 257), {}, False),
        (Prompt(text="a"), {"bad_words": ["x"]}, False),
        (Prompt(token_ids=[5]), {"structured_outputs": {"regex": "a+"}}, False),
    ],
)
def test_only_what_is_read_at_once_is_read_in_the_event_loop(
    text_llm, prompt, params, is_quick
):
    assert text_llm._reader.is_quick(prompt, SamplingParams(**params)) == is_quick


def test_one_word_wakes_a_loop_for_all_of_its_readers_and_a_closed_one_for_none():
    class Loop:
        def __init__(self, is_closed=False):
            self.calls, self.is_closed = [], is_closed

        def call_soon_threadsafe(self, call, *args):
            if self.is_closed:
                raise RuntimeError("Event loop is closed")
            self.calls.append((call, args))

    loops = Loop(), Loop(), Loop(is_closed=True)
    readers = [Reader(None, loops[place]) for place in (0, 1, 2, 0, 0)]
    tell(readers)
    assert [len(loop.calls) for loop in loops] == [1, 1, 0]
    for loop in loops:
        for call, args in loop.calls:
            call(*args)
    assert [one._news.is_set() for one in readers] == [True, True, False, True, True]


def test_cancelled_task_and_cancelled_request_free_their_pages(engine):
    async def main(engine):
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        reader = await engine.add(PROMPTS[1], LONG)
        await anext(reader)
        task.cancel()
        engine.cancel(reader)
        pieces = [piece async for piece in reader]
        assert pieces[-1].outputs[0].finish_reason == "cancelled"
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.drain()
        stats = await engine.stats()
        assert stats["gauges"]["kv_cache_usage_perc"] == 0
        return stats["counters"]["request_success"]

    ended = _run(engine, main)
    assert ended["length"] == 0 and ended["cancelled"] in (1, 2)


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.01])
def test_task_cancelled_while_it_adds_leaves_nothing_behind(engine, delay_s):
    async def main(engine):
        tasks = [asyncio.create_task(engine.generate(p, LONG)) for p in PROMPTS]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.drain()
        assert engine._readers == {}
        ended = (await engine.stats())["counters"]["request_success"]
        assert ended["length"] == 0

    _run(engine, main)


def test_time_limits_end_a_request_with_what_it_has(engine):
    async def main(engine):
        output = await engine.generate(PROMPTS[0], LONG, deadline_s=0.2)
        with pytest.raises(ValueError, match="deadline_s must be above 0, got -1"):
            await engine.generate(PROMPTS[0], LONG, deadline_s=-1)
        return output.outputs[0]

    completion = _run(engine, main)
    assert completion.finish_reason in ("deadline", "length")
    assert len(completion.token_ids) <= 300


def test_bad_request_reaches_its_sender_only_and_a_closed_engine_says_so(engine):
    async def main(engine):
        good = asyncio.create_task(engine.generate(PROMPTS[0], PARAMS))
        with pytest.raises(ValueError, match="in \\[0, 511\\], got 512"):
            await engine.generate([512], PARAMS)
        assert (await good).finished
        await engine.drain()
        with pytest.raises(RuntimeError, match="takes no new requests"):
            await engine.generate([1], PARAMS)

    _run(engine, main)


def test_engine_failure_ends_every_reader_with_a_reason(engine):
    def fail(*args):
        raise OSError("the device is gone")

    async def main(engine):
        readers = [await engine.add(p, LONG) for p in PROMPTS[:2]]
        await anext(readers[0])
        engine._llm._runner.sample = fail
        for reader in readers:
            pieces = [piece async for piece in reader]
            assert pieces[-1].outputs[0].finish_reason == "error"
        with pytest.raises(RuntimeError, match="must be built anew"):
            await engine.generate([1], PARAMS)

    _run(engine, main)
