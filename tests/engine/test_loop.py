"""The loop on the two-layer model: reads a step late, preempts, shares, fails whole."""

import dataclasses
import os
import signal

import numpy as np
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.layers import kv_cache as kv

GREEDY = dict(temperature=0.0, ignore_eos=True)
PAGE = 16


def _params(count, max_tokens=24):
    return [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=max_tokens, logprobs=1,
            ignore_eos=True,
        )
        for i in range(count)
    ]  # fmt: skip


def _prompts(count, seed=0, shared=0):
    rng = np.random.default_rng(seed)
    head = rng.integers(1, 512, shared).tolist()
    return [head + rng.integers(1, 512, 5 + 7 * i).tolist() for i in range(count)]


def _bits(outputs):
    return [
        (o.token_ids, [[(i, e.logprob) for i, e in one.items()] for one in o.logprobs])
        for o in (output.outputs[0] for output in outputs)
    ]


@pytest.fixture(scope="module")
def small_llm(tiny_config, tiny_checkpoint):
    """A pool of 23 pages of 16 tokens, and host memory for 60."""
    model, config = tiny_config
    one = kv.page_bytes(
        kv.allocate(
            model, num_pages=1, page_size=PAGE, storage=kv.KVStorage(dtype="float32")
        )
    )
    changes = {"page_size": PAGE, "num_pages": 24, "max_context_len": 192}
    changes |= {"host_kv_bytes": 60 * one, "num_slots": 8, "decode_batch_sizes": (8,)}
    mapping = config.to_mapping() | changes
    llm = LLM.from_checkpoint(
        tiny_checkpoint, config=EngineConfig.from_mapping(mapping)
    )
    yield llm
    llm.close()


def test_preempted_requests_give_the_bits_that_they_give_alone(small_llm):
    prompts, params = _prompts(8), _params(8, max_tokens=60)
    before = small_llm.stats()["counters"]["num_preemptions"]
    together = small_llm.generate(prompts, params, use_tqdm=False)
    assert small_llm.stats()["counters"]["num_preemptions"] > before
    assert small_llm._loop._manager.num_used == 0
    alone = [
        small_llm.generate([p], [s], use_tqdm=False)[0]
        for p, s in zip(prompts, params, strict=True)
    ]
    assert _bits(together) == _bits(alone)


def test_shared_prefix_is_computed_once_and_changes_no_bit(small_llm):
    prompts, params = _prompts(5, seed=3, shared=40), _params(5)
    cold = [_run(small_llm, p, s, uses_cache=False) for p, s in _zip(prompts, params)]
    first = _run(small_llm, prompts[0], params[0])
    assert first.metrics is not None and _hits(small_llm, prompts[1:], params[1:]) == [
        32, 32, 32, 32,
    ]  # fmt: skip
    warm = small_llm.generate(prompts, params, use_tqdm=False)
    assert _bits(warm) == _bits(cold)


def test_a_chat_reuses_the_answer_before_and_keeps_its_bits(small_llm):
    """Pages that decoding filled, where filling gives the same bits, as here."""
    assert small_llm.ledger.caches_output
    params = _params(1, max_tokens=40)[0]
    turn = _prompts(1, seed=21, shared=32)[0]
    for _ in range(2):
        answer = _run(small_llm, turn, params).outputs[0].token_ids
        # The last token of an answer is never computed, so its page may not be full.
        known = (len(turn) + len(answer) - 1) // PAGE * PAGE
        turn = [*turn, *answer, 7, 8, 9]
        cold = _run(small_llm, turn, params, uses_cache=False)
        before = small_llm.stats()["counters"]["prefix_cache_hits"]
        warm = _run(small_llm, turn, params)
        assert small_llm.stats()["counters"]["prefix_cache_hits"] - before == known
        assert _bits([warm]) == _bits([cold])


def test_tenants_share_pages_with_themselves_only(small_llm):
    prompt, params = _prompts(1, seed=9, shared=70)[0], _params(1)[0]
    hits = [
        _hits(small_llm, [prompt], [params], tenant=tenant)[0]
        for tenant in ("a", "b", "a", None)
    ]
    assert hits == [0, 0, 64, 0]


def test_request_without_a_tenant_is_refused_where_there_are_several(small_llm):
    loop = small_llm._loop
    before = loop._config
    loop._config = dataclasses.replace(before, multi_tenant=True)
    try:
        with pytest.raises(ValueError, match="must name its tenant"):
            small_llm.generate([1, 2])
        params = SamplingParams(max_tokens=1)
        (output,) = small_llm.generate([1, 2], params, use_tqdm=False, tenant="a")
        assert output.finished
    finally:
        loop._config = before


def test_each_turn_reads_once_and_only_after_the_next_dispatch(tiny_llm, monkeypatch):
    runner, events, packs = tiny_llm._runner, [], []
    for name in ("forward", "sample", "read"):
        real = getattr(runner, name)

        def spy(*args, _real=real, _name=name):
            events.append(_name)
            if _name != "read":
                (packed,) = [a for a in args if isinstance(a, np.ndarray)]
                packs.append(packed)
            return _real(*args)

        monkeypatch.setattr(runner, name, spy)
    tiny_llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, **GREEDY))
    steps = ["forward", "sample"]
    # Step N + 1 is dispatched before step N is read; the last step reads alone.
    assert events == [*steps, *[*steps, "read"] * 4, "read"]
    # One host array a step, the same for its programs and for no other step.
    assert [packs[i] is packs[i + 1] for i in range(9)] == [True, False] * 4 + [True]
    assert len({id(packed) for packed in packs}) == 5
    assert len(runner.ledger.entries) == len(runner.program_keys())


def test_failure_ends_every_open_request_with_a_reason(tiny_config, tiny_checkpoint):
    llm = LLM.from_checkpoint(tiny_checkpoint, config=tiny_config[1])
    streams = [llm.stream([1, 2, i + 3], SamplingParams(**GREEDY)) for i in range(2)]
    next(streams[0])
    real = llm._runner.sample

    def fail(*args):
        real(*args)
        raise OSError("the device is gone")

    llm._runner.sample = fail
    with pytest.raises(RuntimeError, match="failed and must be built anew: the device"):
        list(streams[0])
    assert all(s._state.request.finish_reason == "error" for s in streams)
    with pytest.raises(RuntimeError, match="built anew"):
        llm.generate([1, 2])
    llm.close()


def test_interrupt_in_a_turn_waits_for_its_end_and_loses_no_token(tiny_llm):
    params = SamplingParams(max_tokens=12, **GREEDY)
    wanted = tiny_llm.generate([[4, 5], [6, 7]], params, use_tqdm=False)
    one, two = tiny_llm.stream([4, 5], params), tiny_llm.stream([6, 7], params)
    real, tokens = tiny_llm._runner.read_step, []

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return real()

    for piece in one:
        tokens += piece.outputs[0].token_ids
        if len(tokens) == 3:
            break
    tiny_llm._runner.read_step = interrupted
    # A process started in the background may ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(one)
    finally:
        signal.signal(signal.SIGINT, before)
        del tiny_llm._runner.read_step
    tokens += [t for piece in one for t in piece.outputs[0].token_ids]
    others = [t for piece in two for t in piece.outputs[0].token_ids]
    assert [tokens, others] == [o.outputs[0].token_ids for o in wanted]


def _zip(prompts, params):
    return zip(prompts, params, strict=True)


def _run(llm, prompt, params, **fields):
    state = llm._loop.submit(prompt, params, **fields)
    while not state.is_finished:
        llm._loop.turn()
    llm._loop.drop(state)
    return state.output()


def _hits(llm, prompts, params, **fields):
    """Prompt tokens that each request took from the cache, one after the other."""
    counts = []
    for prompt, one in _zip(prompts, params):
        before = llm.stats()["counters"]["prefix_cache_hits"]
        _run(llm, prompt, one, **fields)
        counts.append(llm.stats()["counters"]["prefix_cache_hits"] - before)
    return counts
