"""Drafts change no token and no bit, whoever else runs; wrong ones leave nothing."""

import dataclasses

import jax
import numpy as np
import pytest
from draft_waves import Whim, bits, in_waves, requests

from headrace import LLM, SamplingParams
from headrace.checkpoints.orbax_store import save_store
from headrace.engine import memory_sizes
from headrace.engine.programs import program_name
from headrace.engine.structured_params import StructuredOutputsParams


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
