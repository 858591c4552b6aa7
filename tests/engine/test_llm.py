"""The whole engine on the two-layer model: what a user sees."""

import gc
import itertools

import jax
import numpy as np
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.engine import model_runner

GREEDY = dict(temperature=0.0, ignore_eos=True)


def _prompts(count, seed=0, longest=300):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(1, 512, n).tolist() for n in lengths]


def _tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def _bits(outputs):
    """Every log-probability that the engine reported, exactly."""
    return [
        [{i: (e.logprob, e.rank) for i, e in step.items()} for step in o.logprobs]
        for o in (output.outputs[0] for output in outputs)
    ]


def _mixed_params(count):
    rng = np.random.default_rng(5)
    return [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=int(rng.integers(0, 2**63)),
            max_tokens=int(rng.integers(1, 40)),
            logprobs=3,
            ignore_eos=bool(rng.integers(0, 2)),
        )
        for _ in range(count)
    ]


def _free(llm):
    return llm._loop._manager.num_free, llm._loop._scheduler.num_running


def test_forty_requests_together_give_what_each_gives_alone_bit_for_bit(tiny_llm):
    prompts, params = _prompts(40), _mixed_params(40)
    assert max(map(len, prompts)) > 2 * 128  # longer than two chunks
    free = _free(tiny_llm)
    together = tiny_llm.generate(prompts, params, use_tqdm=False)
    alone = [
        tiny_llm.generate([prompt], one, use_tqdm=False)[0]
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert _tokens(together) == _tokens(alone)
    assert _bits(together) == _bits(alone)
    assert _free(tiny_llm) == free


def test_greedy_tokens_equal_a_naive_loop_without_cache(
    tiny_llm, tiny_checkpoint, dense_logits
):
    config, params = tiny_checkpoint.config, tiny_checkpoint.params

    def naive(prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(np.argmax(dense_logits(config, params, ids)[-1])))
        return ids[len(prompt) :]

    prompts = _prompts(3, seed=9, longest=150)
    outputs = tiny_llm.generate(
        prompts, SamplingParams(**GREEDY, max_tokens=8), use_tqdm=False
    )
    assert _tokens(outputs) == [naive(prompt, 8) for prompt in prompts]


def test_logprobs_are_those_of_the_dense_forward(
    tiny_llm, tiny_checkpoint, dense_logits
):
    prompt = _prompts(1, seed=4)[0][:50]
    params = SamplingParams(**GREEDY, max_tokens=3, logprobs=5)
    completion = tiny_llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    ids = [*prompt, *completion.token_ids]
    logits = dense_logits(tiny_checkpoint.config, tiny_checkpoint.params, ids)
    for step, entries in enumerate(completion.logprobs):
        row = logits[len(prompt) - 1 + step]
        truth = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert completion.token_ids[step] in entries
        assert len(entries) == 5
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(truth[token_id], abs=1e-4)
            assert entry.rank == 1 + (truth > truth[token_id]).sum()


def test_static_policy_gives_the_same_tokens(tiny_config, tiny_checkpoint, tiny_llm):
    config = EngineConfig.from_mapping(
        tiny_config[1].to_mapping() | {"policy": "static"}
    )
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    prompts = _prompts(20, seed=8)
    params = [SamplingParams(**GREEDY, max_tokens=1 + i % 9) for i in range(20)]
    expected = tiny_llm.generate(prompts, params, use_tqdm=False)
    assert _tokens(llm.generate(prompts, params, use_tqdm=False)) == _tokens(expected)
    llm.close()


def test_stream_yields_the_deltas_of_generate(tiny_llm):
    prompt, params = _prompts(1)[0], SamplingParams(**GREEDY, max_tokens=9)
    whole = tiny_llm.generate(prompt, params, use_tqdm=False)[0]
    pieces = list(tiny_llm.stream(prompt, params))
    joined = [t for piece in pieces for t in piece.outputs[0].token_ids]
    assert joined == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces] == [False] * 8 + [True]
    assert pieces[-1].outputs[0].finish_reason == "length"


def test_a_stream_that_is_dropped_frees_its_slot_and_pages(tiny_llm):
    free = _free(tiny_llm)
    stream = tiny_llm.stream([1, 2, 3], SamplingParams(**GREEDY, max_tokens=100))
    next(stream)
    assert _free(tiny_llm) != free
    stream.close()
    assert _free(tiny_llm) == free
    never_started = tiny_llm.stream([1, 2, 3], SamplingParams(max_tokens=100))
    del never_started
    gc.collect()
    assert _free(tiny_llm) == free
    assert not tiny_llm._loop._scheduler.has_work


def test_two_streams_can_be_read_in_turn(tiny_llm):
    params = SamplingParams(**GREEDY, max_tokens=6)
    prompts = _prompts(2, seed=3)
    expected = _tokens(tiny_llm.generate(prompts, params, use_tqdm=False))
    streams = [tiny_llm.stream(prompt, params) for prompt in prompts]
    seen = [[], []]
    # One stream's turn serves the other, too: its deltas may hold several tokens.
    for pair in itertools.zip_longest(*streams):
        for tokens, piece in zip(seen, pair, strict=True):
            tokens += piece.outputs[0].token_ids if piece else []
    assert seen == expected


def test_a_seed_reproduces_and_is_reported(tiny_llm):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first = tiny_llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0]
    again = SamplingParams(
        temperature=1.0, max_tokens=8, ignore_eos=True, seed=first.seed
    )
    second = tiny_llm.generate([7, 8, 9], again, use_tqdm=False)[0].outputs[0]
    assert second.token_ids == first.token_ids
    other = SamplingParams(
        temperature=1.0, max_tokens=8, ignore_eos=True, seed=first.seed ^ 1
    )
    third = tiny_llm.generate([7, 8, 9], other, use_tqdm=False)[0].outputs[0]
    assert third.token_ids != first.token_ids


def test_a_stop_id_ends_the_request_and_stays_in_the_output(tiny_llm):
    prompt = _prompts(1, seed=6)[0]
    free_run = tiny_llm.generate(
        prompt, SamplingParams(**GREEDY, max_tokens=10), use_tqdm=False
    )[0].outputs[0]
    stop = free_run.token_ids[4]
    cut = free_run.token_ids.index(stop) + 1
    params = SamplingParams(**GREEDY, max_tokens=10, stop_token_ids=[stop])
    ended = tiny_llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert ended.token_ids == free_run.token_ids[:cut]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)


def test_every_form_of_a_prompt_is_accepted(tiny_llm):
    ids = [5, 6, 7]
    forms = [ids, tuple(ids), {"prompt_token_ids": ids}, np.array(ids)]
    params = SamplingParams(**GREEDY, max_tokens=3)
    outputs = tiny_llm.generate(forms, params, use_tqdm=False)
    assert len({tuple(tokens) for tokens in _tokens(outputs)}) == 1
    assert [list(o.prompt_token_ids) for o in outputs] == [ids] * 4
    for form in forms:
        assert len(tiny_llm.generate(form, params, use_tqdm=False)) == 1


BAD_PROMPTS = [
    ([], r"at least 1 token, got 0"),
    ([1, 512], r"\[0, 511\], got 512 at place 1"),
    ([-1], r"\[0, 511\], got -1"),
    ([1] * 512, r"at most 511 tokens"),
    ("text", "no tokenizer"),
    ({"promt": "x"}, "promt"),
    (3.5, "got float"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_alone_is_a_value_error_with_the_range(tiny_llm, prompt, message):
    bad = {"prompt_token_ids": prompt} if prompt == [] else prompt
    with pytest.raises(ValueError, match=message):
        tiny_llm.generate(bad, SamplingParams(max_tokens=4), use_tqdm=False)


def test_bad_prompts_in_a_batch_harm_no_other_request(tiny_llm):
    params = SamplingParams(**GREEDY, max_tokens=4)
    good = [9, 8, 7]
    expected = _tokens(tiny_llm.generate(good, params, use_tqdm=False))[0]
    mixed = [bad for bad, _ in BAD_PROMPTS if not isinstance(bad, float | dict)]
    outputs = tiny_llm.generate([good, *mixed, good], params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected
    assert outputs[-1].outputs[0].token_ids == expected
    for output in outputs[1:-1]:
        assert output.finished and output.error
        assert output.outputs[0].finish_reason == "error"


def test_max_tokens_that_cannot_fit_is_refused(tiny_llm):
    with pytest.raises(ValueError, match="max_tokens must be at most 509"):
        tiny_llm.generate([1, 2, 3], SamplingParams(max_tokens=510), use_tqdm=False)


def test_params_must_be_one_or_one_for_each(tiny_llm):
    with pytest.raises(ValueError, match="3 prompts, 2 params"):
        tiny_llm.generate([[1]] * 3, [SamplingParams()] * 2, use_tqdm=False)


def test_unknown_config_keys_are_refused_by_name(tiny_checkpoint):
    with pytest.raises(ValueError, match="'num_slot', did you mean 'num_slots'"):
        LLM.from_checkpoint(tiny_checkpoint, config={"num_slot": 4})


def test_nothing_compiles_while_serving(tiny_llm):
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "compile" in name else None
    )
    prompts = _prompts(30, seed=12)
    tiny_llm.generate(prompts, _mixed_params(30), use_tqdm=False)
    assert compiles == []
    jax.jit(lambda x: x + 1)(np.arange(7))  # the listener does hear compiles
    assert compiles != []


def test_closing_frees_the_device_memory(tiny_config):
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    checkpoint = synthetic_checkpoint(tiny_config[0], seed=1)
    llm = LLM.from_checkpoint(checkpoint, config=tiny_config[1])
    del checkpoint
    assert sum(array.nbytes for array in jax.live_arrays()) > before + 2**20
    llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)
    del llm
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before + 1024


def test_a_program_that_was_not_compiled_at_start_is_refused(tiny_llm):
    with pytest.raises(RuntimeError, match=r"no program decode\[5\]"):
        tiny_llm._runner.program(("decode", 5))
    assert model_runner.program_name(("prefill", (1, 32))) == "prefill[1x32]"
