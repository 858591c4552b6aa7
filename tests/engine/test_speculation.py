"""Drafts change no token and no bit, whoever else runs; wrong ones leave nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.checkpoints.orbax_store import save_store
from headrace.engine import memory_sizes
from headrace.engine.programs import program_name
from headrace.engine.structured_params import StructuredOutputsParams

KINDS = [
    dict(temperature=0.0),
    dict(temperature=0.3),
    dict(temperature=0.0, logprobs=3),
    dict(temperature=0.8, top_k=20, top_p=0.9),
    dict(temperature=0.0, repetition_penalty=1.1, logprobs=2),
    dict(temperature=0.5, frequency_penalty=0.2, presence_penalty=0.1),
    dict(temperature=0.0, min_tokens=9, stop_token_ids=list(range(100, 107))),
    dict(temperature=0.2, min_p=0.2, logit_bias={7: 2.5}),
    dict(temperature=0.0, bad_words=["ab", "zzz"]),
    dict(temperature=0.4, n=2, logprobs=1),
    dict(temperature=0.0, allowed_token_ids=[5, 6, 7, 8], logprobs=1),
]


@pytest.fixture(scope="module")
def noisy_folder(tiny_checkpoint, tmp_path_factory):
    """A model much like the tiny one, but not the same."""
    rng = np.random.default_rng(0)

    def shaken(weight):
        noise = rng.standard_normal(weight.shape, np.float32)
        return weight + np.float32(0.3 * np.std(np.asarray(weight))) * noise

    params = jax.tree.map(shaken, tiny_checkpoint.params)
    folder = tmp_path_factory.mktemp("drafts") / "noisy"
    save_store(folder, dataclasses.replace(tiny_checkpoint, params=params))
    return str(folder)


@pytest.fixture(
    scope="module", params=["prompt-lookup", "self:1", "self:int4", "a model"]
)
def engines(request, text_llm, tiny_checkpoint, byte_tokenizer, noisy_folder):
    """The same model without and with drafts; the second in a pool for few requests."""
    checkpoint = dataclasses.replace(tiny_checkpoint, tokenizer=byte_tokenizer)
    draft = noisy_folder if request.param == "a model" else request.param
    config = dataclasses.replace(
        text_llm.engine_config, draft=draft, scoring=False, num_pages=34,
        host_kv_bytes=2**24,
    )  # fmt: skip
    drafts = LLM.from_checkpoint(checkpoint, config=config)
    drafts._loop._control = Whim(always=True)
    yield text_llm, drafts
    drafts.close()


class Whim:
    """Stands in for the control: drafts always, or at random."""

    def __init__(self, *, always):
        self._always, self._rng = always, np.random.default_rng(5)
        self.choices = {True: 0, False: 0}

    def wants_drafts(self, schedule):
        wants = bool(schedule.decode) and (self._always or self._rng.random() < 0.5)
        self.choices[wants] += bool(schedule.decode)
        return wants

    def on_step(self, schedule, result, did_draft):
        assert did_draft or not schedule.decode or result.num_tokens.max() <= 1

    def snapshot(self):
        return {}


def bits(output):
    """All that a request's user sees."""
    return [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            one.logprobs
            and [[(i, e.logprob, e.rank) for i, e in s.items()] for s in one.logprobs],
        )
        for one in output.outputs
    ]


def requests(count, seed):
    """Prompts that repeat themselves, in part those of others, and parameters."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 250, 40).tolist()
    asked = []
    for index in range(count):
        part = rng.integers(1, 250, int(rng.integers(1, 12))).tolist()
        prompt = (shared if index % 3 == 0 else []) + part * int(rng.integers(1, 6))
        params = SamplingParams(
            **KINDS[index % len(KINDS)],
            seed=int(rng.integers(0, 2**60)),
            max_tokens=int(rng.integers(1, 90)),
            ignore_eos=bool(index % 2),
        )
        asked.append((prompt, params))
    return asked


def in_waves(llm, asked, seed):
    """Requests that come at random turns, among others that leave early."""
    loop, rng = llm._loop, np.random.default_rng(seed)
    waiting, states, rude = list(enumerate(asked)), {}, []
    while waiting or any(not state.is_finished for state in states.values()):
        for _ in range(int(rng.integers(0, 3))):
            if waiting:
                index, (prompt, params) = waiting.pop(0)
                rules = loop.text_rules.resolve(params)
                states[index] = loop.submit(prompt, params, rules=rules)
        if rng.random() < 0.2:
            rude.append(loop.submit([3, 4] * 20, SamplingParams(max_tokens=80)))
        if rude and rng.random() < 0.2:
            loop.drop(rude.pop(0))
        loop.turn()
    loop.drop(*rude, *states.values())
    while loop.has_work:
        loop.turn()
    return [bits(states[index].output()) for index in range(len(asked))]


def test_output_is_that_without_drafts_whoever_comes_and_goes(engines):
    plain, drafts = engines
    asked = requests(44, seed=1)
    alone = [
        bits(plain.generate(dict(prompt_token_ids=p), s, use_tqdm=False)[0])
        for p, s in asked
    ]
    for seed in (1, 2):
        assert in_waves(drafts, asked, seed) == alone
    drafts._loop._control = whim = Whim(always=False)
    assert in_waves(drafts, asked, 3) == alone
    drafts._loop._control = Whim(always=True)
    assert min(whim.choices.values()) > 20
    stats = drafts.stats()
    assert stats["counters"]["num_preemptions"] > 0
    assert stats["counters"]["prefix_cache_hits"] > 0
    found = stats["speculation"]
    assert found["num_accepted_tokens"] > 200 and found["tokens_per_pass"] > 1.1
    assert found["num_draft_tokens"] > found["num_accepted_tokens"]  # some were wrong
    assert drafts._loop._manager.num_used == 0 and not drafts._loop.has_work


def test_text_rules_hold_at_every_token_of_a_pass(engines):
    plain, drafts = engines
    options = dict(temperature=0, max_tokens=60, logit_bias={98: 3.0, 99: 3.0})
    free = plain.generate("abababab", SamplingParams(**options), use_tqdm=False)
    text = free[0].outputs[0].text
    asked = [
        SamplingParams(**options, stop=[text[5:8]]),
        SamplingParams(**options, stop=[text[20:22]], include_stop_str_in_output=True),
        SamplingParams(
            **options, structured_outputs=StructuredOutputsParams(regex="(ab|ba){5,9}")
        ),
        SamplingParams(**options, logprobs=-1),
        SamplingParams(**options, stop=["never there"]),
    ]
    for params in asked:
        (wanted,) = plain.generate("abababab", params, use_tqdm=False)
        (found,) = drafts.generate("abababab", params, use_tqdm=False)
        assert bits(found) == bits(wanted)
        pieces = list(drafts.stream("abababab", params))
        assert pieces[-1].finished
        assert "".join(p.outputs[0].text for p in pieces) == wanted.outputs[0].text


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_fast_mode_computes_again_who_gave_way(
    tiny_checkpoint, tiny_config, tiny_llm, acceptance
):
    config = dataclasses.replace(
        tiny_config[1], draft="self:1", num_drafts=2, num_pages=70,
        numerics="fast", adapts_drafts=False, acceptance=acceptance,
    )  # fmt: skip
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    prompts = [dict(prompt_token_ids=[1 + i, 2, 3] * 20) for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    wanted = tiny_llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    llm.close()
    assert [o.outputs[0].token_ids for o in found] == [
        o.outputs[0].token_ids for o in wanted
    ]
    assert stats["counters"]["num_preemptions"] > 0
    assert stats["speculation"]["tokens_per_pass"] > 1.2


def test_the_plan_counts_what_programs_with_drafts_take(engines):
    llm = engines[1]
    for key in llm._runner.program_keys():
        bound = memory_sizes.program_temp_bytes(
            key, llm.model_config, llm._runner.config, "cpu"
        )
        assert llm.ledger.entries[program_name(key)].temp_bytes <= bound, key
    assert {"generating", "filling", "drafting"} <= {
        entry.role for entry in llm.ledger.entries.values()
    }
    letters = {
        llm.ledger.entries[name].bit_class
        for name in llm.ledger.entries
        if name.startswith(("verify", "prefill"))
    }
    assert letters == {"A"}
