"""Tokens per pass are what an acceptance that is known beforehand says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from draft_waves import Whim

from headrace import LLM, SamplingParams
from headrace.checkpoints.orbax_store import save_store
from headrace.engine import model_runner
from headrace.engine.proposer import Drafts, Proposer
from headrace.engine.sampler import gumbel_noise

NUM_DRAFTS, LENGTH = 3, 470


@dataclasses.dataclass(frozen=True, eq=False)
class Oracle(Proposer):
    """Knows the text that everybody will get; says it with probability `a` a token."""

    truth_L: np.ndarray
    a: float

    def draft(self, params, kv_cache, drafting, step):
        rows, found = step.rows, []
        for index in range(1, 1 + step.layout.num_drafts):
            place_B = rows.position_B + index
            right_B = jnp.asarray(self.truth_L)[jnp.minimum(place_B, LENGTH)]
            # Noise that nothing else in a greedy request uses.
            noise_B1 = gumbel_noise(rows.seed_B2, place_B, 1)
            is_said_B = jnp.exp(-jnp.exp(-noise_B1[:, 0])) < self.a
            found.append(jnp.where(is_said_B, right_B, right_B ^ 1))
        return kv_cache, Drafts(jnp.stack(found, 1))


@pytest.mark.parametrize("a", [0.4, 0.8])
def test_tokens_per_pass_follow_the_formula(
    a, tiny_config, tiny_checkpoint, tiny_llm, monkeypatch, tmp_path
):
    prompt = [5, 6, 7]
    greedy = SamplingParams(
        temperature=0, max_tokens=LENGTH - len(prompt), ignore_eos=True
    )
    asked = dict(prompt_token_ids=prompt)
    (plain,) = tiny_llm.generate(asked, greedy, use_tqdm=False)
    truth_L = np.array([*prompt, *plain.outputs[0].token_ids, 0], np.int32)
    monkeypatch.setattr(
        model_runner, "proposer_of", lambda *_: Oracle(truth_L=truth_L, a=a)
    )
    config = dataclasses.replace(
        tiny_config[1], draft="prompt-lookup", num_drafts=NUM_DRAFTS, num_slots=8,
        decode_batch_sizes=(8,), prefill_shapes=((1, 32),), adapts_drafts=False,
    )  # fmt: skip
    # A folder of its own: the store would take the oracle for prompt lookup.
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config, cache_dir=tmp_path)
    llm._loop._control = Whim(always=True)
    many = [dataclasses.replace(greedy, seed=seed) for seed in range(32)]
    outputs = llm.generate([asked] * len(many), many, use_tqdm=False)
    found = llm.stats()["speculation"]
    llm.close()
    assert all(o.outputs[0].token_ids == plain.outputs[0].token_ids for o in outputs)
    formula = (1 - a ** (NUM_DRAFTS + 1)) / (1 - a)
    assert found["tokens_per_pass"] == pytest.approx(formula, rel=0.02)
    by_place = np.divide(
        found["num_accepted_tokens_per_pos"], found["num_draft_tokens_per_pos"]
    )
    assert by_place == pytest.approx(a ** np.arange(1, 1 + NUM_DRAFTS), abs=0.02)


def test_a_draft_model_that_is_the_target_is_always_right(
    tiny_config, tiny_checkpoint, tmp_path
):
    save_store(tmp_path / "same", tiny_checkpoint)
    config = dataclasses.replace(
        tiny_config[1], draft=str(tmp_path / "same"), num_drafts=NUM_DRAFTS,
        adapts_drafts=False, num_slots=8, decode_batch_sizes=(8,),
    )  # fmt: skip
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    rng = np.random.default_rng(2)
    # Prompts of several chunks, some with a prefix that is cached by then.
    shared = rng.integers(0, 512, 150).tolist()
    prompts = [shared + rng.integers(0, 512, 1 + 17 * i).tolist() for i in range(10)]
    params = [
        SamplingParams(
            temperature=[0.0, 0.7][i % 2], top_p=0.9, seed=i, max_tokens=61,
            ignore_eos=True,
        )
        for i in range(10)
    ]  # fmt: skip
    asked = [dict(prompt_token_ids=ids) for ids in prompts]
    llm.generate(asked, params, use_tqdm=False)
    stats = llm.stats()
    llm.close()
    found = stats["speculation"]
    assert stats["counters"]["prefix_cache_hits"] > 0
    assert found["num_accepted_tokens"] == found["num_draft_tokens"] > 400
