"""SmolLM2 with real weights against transformers in float32 (golden/make_golden.py)."""

import json
import pathlib

import numpy as np
import pytest

from headrace import SamplingParams

pytestmark = pytest.mark.real_model

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden/smollm2_135m_greedy.json").read_text()
)
SCORES = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden/smollm2_135m_scores.json").read_text()
)
GREEDY = SamplingParams(
    temperature=0,
    max_tokens=48,
    ignore_eos=True,
    logprobs=20,
    skip_special_tokens=False,
)


@pytest.fixture(scope="module")
def outputs(smollm_llm):
    prompts = [row["ids"] for row in GOLDEN["prompts"]]
    return smollm_llm.generate(prompts, GREEDY, use_tqdm=False)


def test_golden_prompts_are_varied_and_unambiguous():
    kinds = [row["kind"] for row in GOLDEN["prompts"]]
    assert len(kinds) >= 16
    assert set(kinds) == {
        "english", "code", "digits", "french", "chinese", "emoji", "whitespace",
        "long", "chat",
    }  # fmt: skip
    assert min(min(row["margins"]) for row in GOLDEN["prompts"]) > 1e-3
    assert max(len(row["ids"]) for row in GOLDEN["prompts"]) > 256


def test_greedy_tokens_equal_transformers_over_48_steps(outputs):
    seen = [output.outputs[0].token_ids for output in outputs]
    assert seen == [row["tokens"] for row in GOLDEN["prompts"]]


def test_text_equals_the_reference_decoding(outputs):
    seen = [output.outputs[0].text for output in outputs]
    assert seen == [row["decoded"] for row in GOLDEN["prompts"]]


def test_first_step_logprobs_agree_within_a_thousandth(outputs):
    worst = 0.0
    for output, row in zip(outputs, GOLDEN["prompts"], strict=True):
        first = output.outputs[0].logprobs[0]
        shared = [i for i in row["first_logprobs"] if int(i) in first]
        assert len(shared) >= 19  # a near tie at rank 20 may fall out
        for token_id in shared:
            truth = row["first_logprobs"][token_id]
            worst = max(worst, abs(first[int(token_id)].logprob - truth))
    print(f"largest difference {worst:.2e} nat")
    assert worst < 1e-3


@pytest.fixture(scope="module")
def scored(smollm_llm):
    """The prompts with their golden tokens behind them, as prompts to be scored."""
    prompts = [row["ids"] + row["tokens"] for row in GOLDEN["prompts"]]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5)
    return smollm_llm.generate(prompts, params, use_tqdm=False)


def test_prompt_logprobs_and_the_best_five_are_those_of_transformers(scored):
    """smollm2_135m_scores.json; neighbours closer than 2e-3 may change places."""
    worst = places = 0
    for output, truth in zip(scored, SCORES["prompts"], strict=True):
        entries = output.prompt_logprobs[truth["first"] :]
        ids = output.prompt_token_ids[truth["first"] :]
        rows = zip(entries, ids, truth["logprobs"], truth["top_ids"],
                   truth["top_logprobs"], strict=True)  # fmt: skip
        for entry, token_id, logprob, top_ids, top_logprobs in rows:
            worst = max(worst, abs(entry[token_id].logprob - logprob))
            ranked = {e.rank: i for i, e in reversed(entry.items())}
            values = dict(zip(top_ids, top_logprobs, strict=True))
            for place, expected in enumerate(top_ids):
                got = ranked[place + 1]
                if got == expected:
                    worst = max(worst, abs(entry[got].logprob - values[expected]))
                    continue
                assert abs(entry[got].logprob - values[expected]) < 2e-3
            places += 1
    print(f"{places} places, largest difference {worst:.2e} nat")
    assert places > 1500 and worst < 1e-3


def test_generated_logprobs_are_those_of_scoring_bit_for_bit(outputs, scored):
    for output, score in zip(outputs, scored, strict=True):
        one = output.outputs[0]
        for token_id, made, told in zip(
            one.token_ids, one.logprobs, score.prompt_logprobs[-48:], strict=True
        ):
            assert made[token_id].logprob == told[token_id].logprob


def test_text_prompts_and_chats_give_the_reference_ids(smollm_llm):
    tokenizer = smollm_llm.tokenizer
    for row in GOLDEN["prompts"]:
        assert tokenizer.encode(row["text"]) == row["ids"]
        if row["messages"]:
            prompt = smollm_llm._reader.chat(
                row["messages"], add_generation_prompt=True
            )
            assert prompt.text == row["text"]


def test_streamed_text_joined_equals_generated_text(smollm_llm, outputs):
    for row, output in list(zip(GOLDEN["prompts"], outputs, strict=True))[::9]:
        pieces = [
            piece.outputs[0].text for piece in smollm_llm.stream(row["ids"], GREEDY)
        ]
        assert "".join(pieces) == output.outputs[0].text
        assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_real_requests_together_give_the_bits_of_each_alone(smollm_llm, outputs):
    for row, together in list(zip(GOLDEN["prompts"], outputs, strict=True))[1::9]:
        alone = smollm_llm.generate(row["ids"], GREEDY, use_tqdm=False)[0]
        assert alone.outputs[0].logprobs == together.outputs[0].logprobs


def test_the_ledger_names_every_program_and_its_class(smollm_llm):
    table = smollm_llm.ledger.table()
    for name in ("decode[8]", "decode[16]", "prefill[1x64]", "sample[greedy, 8]"):
        assert name in table
    assert "generating: " in table and "filling: " in table
    assert np.isfinite([e.seconds for e in smollm_llm.ledger.entries.values()]).all()
