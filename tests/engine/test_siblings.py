"""Several completions of one prompt: filled once, pages shared until they differ."""

import numpy as np
import pytest

from headrace import SamplingParams
from headrace.engine.admission import QueueFullError
from headrace.engine.request import RequestStatus

PAGE = 16


@pytest.mark.parametrize("prompt_len", [5, PAGE, 40, 3 * PAGE])
def test_prompt_is_filled_once_and_its_full_pages_are_shared(engine_of, prompt_len):
    engine = engine_of(num_slots=4)
    engine.add(engine.request("a", prompt_len, max_tokens=20, n=3))
    engine.run_until_decode()
    full = prompt_len // PAGE
    assert [r.pages[:full] for r in engine.requests] == [
        engine.requests[0].pages[:full]
    ] * 3
    assert engine.manager.num_used == full + 3  # a page of its own for each
    assert engine.num_forks == 2
    engine.run()
    assert sum(engine.chunks["a"]) == prompt_len and set(engine.chunks) == {"a"}
    engine.check_end()


def test_more_completions_than_slots_come_one_after_the_other(engine_of):
    engine = engine_of(num_slots=2, decode_batch_sizes=(2,))
    engine.add(engine.request("a", 20, max_tokens=6, n=5))
    engine.run()
    engine.check_end()
    assert len(engine.requests) == 5


@pytest.mark.parametrize("gone", [0, 1])
def test_siblings_go_on_when_one_is_aborted_while_the_prompt_is_filled(engine_of, gone):
    engine = engine_of(prefill_shapes=((1, 16),))
    engine.add(engine.request("a", 60, n=3))
    engine.step()
    engine.step()
    assert engine.requests[0].num_prefilled == 32
    engine.scheduler.abort(engine.requests[gone].request_id)
    engine.run()
    engine.check_end()
    chunks = engine.chunks.get("a-1", []) if gone == 0 else engine.chunks["a"]
    assert sum(chunks) == (60 - 32 if gone == 0 else 60)


def test_a_queue_takes_all_siblings_or_none(engine_of):
    engine = engine_of(max_queued_requests=3)
    with pytest.raises(ValueError, match="whose max_queued_requests is 3, got 4"):
        engine.add(engine.request("a", 5, n=4))
    assert not engine.scheduler.has_work
    engine.add(engine.request("b", 5, n=2))
    with pytest.raises(QueueFullError, match="max_queued_requests is 3"):
        engine.add(engine.request("c", 5, n=2))
    assert engine.scheduler.num_waiting == 2
    engine.run()
    assert all(r.status is RequestStatus.FINISHED for r in engine.requests)


def _bits(completion):
    entries = [[(i, e.logprob) for i, e in one.items()] for one in completion.logprobs]
    return completion.token_ids, entries


@pytest.mark.parametrize("prompt_len", [21, 32])
@pytest.mark.parametrize("uses_cache", [True, False])
def test_each_completion_equals_the_one_that_its_seed_gives_alone(
    tiny_llm, prompt_len, uses_cache
):
    prompt = np.random.default_rng(5).integers(1, 512, prompt_len).tolist()
    options = dict(max_tokens=20, ignore_eos=True, logprobs=2)
    params = SamplingParams(n=4, seed=11, **options)
    state = tiny_llm._loop.submit(prompt, params, uses_cache=uses_cache)
    while not state.is_finished:
        tiny_llm._loop.turn()
    tiny_llm._loop.drop(state)
    completions = state.output().outputs
    assert [c.index for c in completions] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in completions}) == 4
    assert completions[0].seed == 11
    for completion in completions:
        one = SamplingParams(seed=completion.seed, **options)
        (alone,) = tiny_llm.generate(prompt, one, use_tqdm=False)
        assert _bits(alone.outputs[0]) == _bits(completion)
    assert tiny_llm._loop._manager.num_used == 0


def test_streamed_pieces_of_each_completion_join_to_the_whole(tiny_llm):
    params = SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True)
    (whole,) = tiny_llm.generate([3, 1, 4], params, use_tqdm=False)
    tokens, ends = {0: [], 1: [], 2: []}, []
    for piece in tiny_llm.stream([3, 1, 4], params):
        ends.append(piece.finished)
        for output in piece.outputs:
            tokens[output.index] += output.token_ids
    assert [tokens[c.index] for c in whole.outputs] == [
        c.token_ids for c in whole.outputs
    ]
    assert ends == [False] * (len(ends) - 1) + [True]


def test_several_greedy_completions_are_refused():
    with pytest.raises(ValueError, match="n must be 1 with temperature 0"):
        SamplingParams(n=2, temperature=0.0)
    with pytest.raises(ValueError, match=r"n must be .*16384"):
        SamplingParams(n=20000)
