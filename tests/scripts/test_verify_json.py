"""verify_json: its schemas are bounded, its checker can fail. Grammars are walked at
random in place of a model."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from absl.testing import flagsaver
from tokenizers import decoders, models, pre_tokenizers

from headrace.engine.grammar_tokens import GrammarTokens
from headrace.engine.outputs import CompletionOutput, RequestOutput
from headrace.engine.structured import GrammarCompiler
from headrace.scripts import engine_flags, verify_json

EOS, VOCAB_SIZE = 256, 257


def byte_tokenizer():
    """One token per byte, so that a text has as many tokens as it can have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    fast = tokenizers.Tokenizer(models.BPE(vocab, []))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["</s>"])
    return fast


FAST = byte_tokenizer()
COMPILER = GrammarCompiler(GrammarTokens(FAST.to_str(), VOCAB_SIZE, [EOS]))


def walk(params, seed):
    """Random allowed tokens up to the end token; never more than a request may have."""
    state, rng = COMPILER.compile(params), np.random.default_rng(seed)
    mask_W, ids = np.zeros(9, np.int32), []
    while EOS not in ids:
        assert len(ids) < verify_json.MAX_TOKENS
        state.fill_mask(mask_W, stop_ids=[EOS])
        bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
        ids.append(int(rng.choice(np.flatnonzero(bits))))
        state.advance(ids[-1])
    return ids


class WalkingLLM:
    """Answers with random walks; `change` may spoil what it says."""

    def __init__(self, change=lambda text: text, finish_reason="stop"):
        self.change, self.finish_reason = change, finish_reason

    def generate(self, prompts, params, *, use_tqdm):
        return [self._answer(one, self.change) for one in params]

    def stream(self, prompt, params):
        whole = self._answer(params, lambda text: text)
        for char in whole.outputs[0].text:
            piece = CompletionOutput(text=char)
            yield dataclasses.replace(whole, outputs=[piece])

    def _answer(self, params, change):
        ids = walk(params.structured_outputs, params.seed)
        completion = CompletionOutput(
            text=change(FAST.decode(ids)),
            token_ids=ids,
            finish_reason=self.finish_reason,
        )
        return RequestOutput(
            request_id="0",
            prompt=None,
            prompt_token_ids=(),
            outputs=[completion],
            finished=True,
        )


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script with an LLM: (exit code, the printed facts, errors)."""

    def whole(llm, **values):
        monkeypatch.setattr(engine_flags, "build_llm", lambda: llm)
        if not verify_json.FLAGS.is_parsed():
            verify_json.FLAGS(["verify_json"])
        with flagsaver.flagsaver(**values):
            code = verify_json.main([])
        printed = capsys.readouterr()
        return code, json.loads(printed.out.splitlines()[-1]), printed.err

    return whole


def test_walks_through_fifty_schemas_are_valid_and_within_the_bound():
    cases = verify_json.make_cases(50, seed=0)
    assert len({json.dumps(case.schema) for case in cases}) > 45
    for case in cases:
        longest = verify_json.longest_bytes(case.schema, case.is_spaced)
        for seed in range(3):
            ids = walk(case.outputs_params, seed)
            assert len(ids) - 1 <= longest < verify_json.MAX_TOKENS
            assert verify_json.fault(case, FAST.decode(ids), "stop") is None


def test_schemas_are_varied_and_the_same_for_a_seed():
    cases = verify_json.make_cases(50, seed=1)
    assert cases == verify_json.make_cases(50, seed=1)
    assert cases != verify_json.make_cases(50, seed=2)
    text = json.dumps([case.schema for case in cases])
    for word in ("enum", "maxItems", "maxLength", "minimum", "boolean", "pattern"):
        assert word in text
    assert any(
        value.get("type") == "object"
        for case in cases
        for value in case.schema["properties"].values()
    )
    assert {case.temperature for case in cases} == {0.0, 0.7, 1.5}
    assert {case.is_spaced for case in cases} == {True, False}


def test_bound_holds_for_the_longest_text():
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 2},
            "a": {"type": "array", "items": {"enum": ["é", 1]}, "maxItems": 2},
            "i": {"type": "integer", "minimum": -100, "maximum": 5},
        },
    }
    tight = '{"s":"\\u001f\\u001f","a":["\\u00e9","\\u00e9"],"i":-100}'
    assert json.loads(tight)
    # A comma more than there can be, after each last part.
    assert verify_json.longest_bytes(schema, False) == len(tight) + 2
    spaced = (
        ' { "s" : "\\u001f\\u001f" , "a" : [ "\\u00e9" , "\\u00e9" ] , "i" : -100 } '
    )
    assert verify_json.longest_bytes(schema, True) >= len(spaced)


@pytest.mark.parametrize(
    "text, reason, found",
    [
        ('{"x":5}', "stop", None),
        ('{"x":5}', "length", "finish_reason is 'length'"),
        ('{"x":5', "stop", "no JSON"),
        ('{"x":6}', "stop", "does not fit"),
        ('{"x": 5}', "stop", "white space"),
    ],
)
def test_checker_tells_what_is_wrong(text, reason, found):
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}}
    case = verify_json.Case(schema=schema, seed=0, temperature=0.0, is_spaced=False)
    assert (found or "None") in str(verify_json.fault(case, text, reason))


def test_all_valid_exits_with_0_and_counts(run):
    code, facts, _ = run(WalkingLLM(), num_schemas=9, stream_every=4)
    assert code == 0
    assert (facts["valid"], facts["total"], facts["streamed"]) == (9, 9, 3)
    assert facts["tokens"] > 9 * 2


def test_one_that_is_cut_short_fails_and_is_shown(run):
    code, facts, errors = run(WalkingLLM(finish_reason="length"), num_schemas=3)
    assert code == 1 and facts["valid"] == 0
    assert errors.count("schema {") == errors.count("seed ") == 3


def test_text_that_does_not_fit_fails(run):
    code, facts, errors = run(WalkingLLM(lambda text: text + "}"), num_schemas=2)
    assert code == 1 and facts["valid"] == 0 and "no JSON" in errors


def test_stream_that_gives_another_text_fails(run):
    spaced = WalkingLLM(lambda text: json.dumps(json.loads(text)) + "\n")
    code, facts, errors = run(spaced, num_schemas=9, stream_every=1)
    assert code == 1 and facts["valid"] == 0 and "streamed it is" in errors
