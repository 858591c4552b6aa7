"""Scores of given texts: the bits of generation, and no token left out."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.engine.new_request import make_request, make_siblings
from headrace.engine.prompt_scores import book_prompt_scores
from headrace.engine.request_state import RequestState
from headrace.engine.schedule import PrefillChunk, Scores

GREEDY = dict(temperature=0, ignore_eos=True)


def _ids(count, seed=0):
    return np.random.default_rng(seed).integers(1, 512, count).tolist()


def _generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("prompt_len", [1, 31, 32, 33, 130, 300])
def test_generated_logprobs_equal_those_of_scoring_bit_for_bit(tiny_llm, prompt_len):
    prompt = _ids(prompt_len, prompt_len)
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, logprobs=2, ignore_eos=True
    )
    (one,) = _generate(tiny_llm, [prompt], params)[0].outputs
    (score,) = tiny_llm.score([prompt], [one.token_ids], use_tqdm=False)
    chosen = [row[i] for row, i in zip(one.logprobs, one.token_ids, strict=True)]
    assert score.logprobs == [entry.logprob for entry in chosen]
    assert score.ranks == [entry.rank for entry in chosen]
    assert score.logprob == pytest.approx(one.cumulative_logprob, abs=1e-9)
    assert not score.is_greedy and score.error is None
    (best,) = _generate(
        tiny_llm, [prompt], SamplingParams(max_tokens=4, **GREEDY)
    )[0].outputs  # fmt: skip
    assert tiny_llm.score([prompt], [best.token_ids], use_tqdm=False)[0].is_greedy


def test_prompt_logprobs_are_those_of_the_dense_forward(
    tiny_llm, tiny_config, tiny_checkpoint, dense_logits
):
    ids = _ids(150)
    params = SamplingParams(max_tokens=1, prompt_logprobs=3, **GREEDY)
    (output,) = _generate(tiny_llm, [ids], params)
    z = dense_logits(tiny_config[0], tiny_checkpoint.params, ids)
    truth = z - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    truth -= z.max(1, keepdims=True)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 150
    for place, entry in enumerate(output.prompt_logprobs[1:]):
        row, token_id = truth[place], ids[place + 1]
        assert next(iter(entry)) == token_id
        for other, one in entry.items():
            assert one.logprob == pytest.approx(row[other], abs=1e-4)
            close = np.sum(np.abs(row - row[other]) < 1e-4) - 1
            assert abs(one.rank - 1 - np.sum(row > row[other])) <= close
        assert 3 <= len(entry) <= 4 and {1, 2, 3} <= {e.rank for e in entry.values()}


def test_scored_prompt_reads_no_cached_prefix_and_others_may_read_its_pages(tiny_llm):
    ids, params = _ids(100, 7), SamplingParams(max_tokens=6, logprobs=1, **GREEDY)
    scoring = dataclasses.replace(params, prompt_logprobs=0)
    hits = lambda: tiny_llm._loop._manager.stats.hit_tokens  # noqa: E731
    (first,) = _generate(tiny_llm, [ids], scoring)
    before = hits()
    (second,) = _generate(tiny_llm, [ids], scoring)
    assert hits() == before
    assert second.prompt_logprobs == first.prompt_logprobs
    assert None not in second.prompt_logprobs[1:]
    (plain,) = _generate(tiny_llm, [ids], params)
    assert hits() == before + 96
    assert plain.outputs[0].logprobs == first.outputs[0].logprobs
    assert plain.prompt_logprobs is None


def test_plain_neighbours_of_scored_prompts_keep_their_bits(tiny_llm):
    plain = SamplingParams(max_tokens=9, temperature=0.9, seed=1, logprobs=4)
    scored = SamplingParams(max_tokens=3, prompt_logprobs=20, **GREEDY)
    prompts = [_ids(10 + 23 * i, i) for i in range(10)]
    params = [plain if i % 2 else scored for i in range(10)]
    together = _generate(tiny_llm, prompts, params)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = _generate(tiny_llm, [prompt], one)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
        assert alone.prompt_logprobs == output.prompt_logprobs


def test_whole_vocabulary_has_the_bits_of_the_few_likeliest(tiny_llm):
    ids, params = _ids(20), SamplingParams(max_tokens=3, logprobs=5, seed=2)
    few = _generate(tiny_llm, [ids], params)[0].outputs[0].logprobs
    for count, size in ((-1, 512), (40, 41)):
        many = dataclasses.replace(params, logprobs=count)
        rows = _generate(tiny_llm, [ids], many)[0].outputs[0].logprobs
        for row, best in zip(rows, few, strict=True):
            assert {i: row[i] for i in best} == best
            assert len(row) in (size, size - 1)
            ranked = [e.logprob for e in list(row.values())[1:]]
            assert ranked == sorted(ranked, reverse=True)
            if count == -1:
                total = math.fsum(math.exp(e.logprob) for e in row.values())
                assert total == pytest.approx(1, abs=1e-4)


def test_first_delta_alone_brings_the_prompts_logprobs(tiny_llm):
    params = SamplingParams(max_tokens=4, prompt_logprobs=1, **GREEDY)
    deltas = list(tiny_llm.stream(_ids(40), params))
    (whole,) = _generate(tiny_llm, [_ids(40)], params)
    assert deltas[0].prompt_logprobs == whole.prompt_logprobs
    assert [d.prompt_logprobs for d in deltas[1:]] == [None] * 3


def test_deltas_bring_the_prompts_logprobs_once_they_are_there(tiny_llm):
    """A sibling that ends before the prompt was filled brings none of them."""
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, n=2)
    request = make_request(
        "r", [5, 6, 7], params,
        model_config=tiny_llm.model_config, engine_config=tiny_llm.engine_config,
    )  # fmt: skip
    state = RequestState(make_siblings(request), None)
    state.completions[1].request.finish_reason = "rejected"
    state.completions[1].end()
    assert state.has_news and state.take_news().prompt_logprobs is None
    request.prompt_logprobs[1:] = [{6: (-1.5, 3)}, {7: (-2.5, 9)}]
    request.output_token_ids += [8]
    state.completions[0].add_token()
    found = state.take_news().prompt_logprobs
    assert [None, *(e.logprob for x in found[1:] for e in x.values())] == [
        None, -1.5, -2.5
    ]  # fmt: skip
    state.completions[0].request.finish_reason = "cancelled"
    state.completions[0].end()
    assert state.take_news().prompt_logprobs is None


def test_completions_share_one_scored_prompt(tiny_llm):
    params = SamplingParams(max_tokens=2, prompt_logprobs=0, n=3, seed=1)
    (output,) = _generate(tiny_llm, [_ids(60)], params)
    (one,) = _generate(tiny_llm, [_ids(60)], dataclasses.replace(params, n=1))
    assert len(output.outputs) == 3 and output.prompt_logprobs == one.prompt_logprobs


def test_a_chunks_scores_go_to_the_tokens_one_place_further_on(engine_of):
    engine = engine_of()
    request = engine.request("a", 6, 3)
    request.params = dataclasses.replace(request.params, prompt_logprobs=1)
    request.prompt_logprobs = [None] * 6
    ids = np.arange(10).reshape(2, 5)
    scores = Scores(-ids / 1.0, ids + 1, ids[..., None], -ids[..., None] / 2.0, ids)

    def chunk(start, length):
        return PrefillChunk(
            request=request, slot=0, start=start, length=length, is_last=False
        )

    book_prompt_scores([chunk(0, 4), chunk(4, 2)], scores)
    tokens = request.prompt_token_ids
    firsts = [entry and entry[tokens[i]] for i, entry in enumerate(
        request.prompt_logprobs
    )]  # fmt: skip
    assert firsts == [
        None, (-0.0, 1), (-1.0, 2), (-2.0, 3), (-3.0, 4), (-5.0, 6)
    ]  # fmt: skip


def test_perplexity_scores_each_token_once_with_room_before_it(tiny_llm):
    assert tiny_llm.engine_config.max_context_len == 512
    short = _ids(300)
    found = tiny_llm.perplexity(short, use_tqdm=False)
    (whole,) = tiny_llm.score([short[:1]], [short[1:]], use_tqdm=False)
    assert (found.num_tokens, found.logprob) == (299, whole.logprob)
    assert found.perplexity == pytest.approx(math.exp(-whole.logprob / 299))
    long, window, stride = _ids(1300, 1), 511, 200
    found = tiny_llm.perplexity(long, stride=stride, use_tqdm=False)
    logprobs, begin = [], 0
    while len(logprobs) < 1299:
        done = len(logprobs) + 1 - begin
        part = long[begin : begin + window]
        (score,) = tiny_llm.score([part[:done]], [part[done:]], use_tqdm=False)
        logprobs += score.logprobs
        begin += stride
    assert found.num_tokens == 1299 and found.logprob == math.fsum(logprobs)


def test_what_cannot_be_scored_is_refused_or_told_in_its_place(tiny_llm):
    for call, message in (
        (lambda: tiny_llm.score([[1]], [[2], [3]]), "as many as prompts, 1, got 2"),
        (lambda: tiny_llm.score([1, 2], []), "continuations must be as many"),
        (lambda: tiny_llm.score([[1]], [[]]), "continuation must have at least 1"),
        (lambda: tiny_llm.perplexity([4]), "at least 2 tokens, got 1"),
        (lambda: tiny_llm.perplexity([4, 5], stride=511), r"\[1, 510\], got 511"),
        (lambda: tiny_llm.score(["a"], ["b"]), "has no tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    good, bad = tiny_llm.score([[1, 2], [3]], [[3], [600]], use_tqdm=False)
    assert good.error is None and len(good.logprobs) == 1
    assert "[0, 511], got 600" in bad.error and bad.logprobs == ()
    late = tiny_llm.score([[1]] * 2, [[2]] * 2, use_tqdm=False, queue_timeout_s=1e-9)
    assert {one.error for one in late} == {"it waited longer than its queue_timeout_s"}
    with pytest.raises(ValueError, match="waited longer"):
        tiny_llm.perplexity([1, 2], use_tqdm=False, queue_timeout_s=1e-9)


def test_an_engine_without_scoring_says_what_it_needs(tiny_config, tiny_checkpoint):
    config = dataclasses.replace(tiny_config[1], max_logprobs=7)
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    assert not any(name.startswith("score") for name in llm.ledger.entries)
    for call in (
        lambda: llm.score([[1]], [[2]]),
        lambda: llm.perplexity([1, 2]),
        lambda: llm.generate([1], SamplingParams(prompt_logprobs=0)),
    ):
        with pytest.raises(ValueError, match="scoring=True"):
            call()
    with pytest.raises(ValueError, match=r"logprobs must be in \[0, 7\] .*got -1"):
        llm.generate([1], SamplingParams(logprobs=-1))
    llm.close()


def test_the_logits_of_a_scored_chunk_are_never_in_memory_at_once(tiny_llm):
    key, V = ("score", (1, 128)), 512
    program = tiny_llm._runner.program(key)
    sizes = [
        math.prod(int(n) for n in text.split("]")[0].split(",") if n)
        for text in program.as_text().split("f32[")[1:]
        if f"{V}]" in text[:20]
    ]
    assert sizes and max(sizes) <= max(64 * V, 12 * V, V * 256)
    assert jax.tree.structure(tiny_llm._runner.describe(key).out).num_leaves == 8
