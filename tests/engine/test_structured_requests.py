"""Structured outputs and bad words through the engine: what comes out, and for whom."""

import dataclasses
import json
import re
import threading

import jsonschema
import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.engine.structured import GrammarState
from headrace.engine.structured_params import StructuredOutputsParams as Structured
from headrace.engine.text_rules import TextRules

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["ab", "c"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "tags", "ok"],
    "additionalProperties": False,
}
AS_JSON = Structured(json=SCHEMA, disable_any_whitespace=True)
SHAPED = [
    dict(structured_outputs=AS_JSON),
    dict(structured_outputs=AS_JSON, temperature=0.0, repetition_penalty=1.5),
    dict(structured_outputs=Structured(regex="[ab]{3,9}c+"), min_tokens=12),
    dict(structured_outputs=Structured(choice=["yes", "no", "perhaps"]), top_k=5),
    dict(structured_outputs=Structured(regex="a{4}"), ignore_eos=True),
]
PLAIN = SamplingParams(max_tokens=20, temperature=0.8, seed=4, logprobs=2)
PROMPTS = [[7 + i] * (3 + 11 * i) for i in range(10)]


def _params(index):
    options = dict(seed=index, max_tokens=80, logprobs=1) | SHAPED[index % len(SHAPED)]
    return SamplingParams(**options)


def _check(index, output):
    text, reason = output.outputs[0].text, output.outputs[0].finish_reason
    assert reason == "stop", text
    match index % len(SHAPED):
        case 0 | 1:
            jsonschema.validate(json.loads(text), SCHEMA)
        case 2:
            assert re.fullmatch("[ab]{3,9}c+", text)
            assert len(output.outputs[0].token_ids) >= 12
        case 3:
            assert text in ("yes", "no", "perhaps")
        case 4:
            assert text == "aaaa"


def _bits(output):
    one = output.outputs[0]
    return one.token_ids, one.text, one.logprobs


def _generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def test_every_output_matches_and_nobody_notices_the_others(text_llm):
    params = [PLAIN if i % 2 else _params(i // 2) for i in range(10)]
    together = _generate(text_llm, PROMPTS, params)
    for i, (prompt, one, output) in enumerate(
        zip(PROMPTS, params, together, strict=True)
    ):
        if i % 2 == 0:
            _check(i // 2, output)
        (alone,) = _generate(text_llm, [prompt], one)
        assert _bits(alone) == _bits(output)


def test_stream_and_siblings_match_too(text_llm):
    params = dataclasses.replace(_params(0), n=4, temperature=1.2)
    (output,) = _generate(text_llm, [PROMPTS[2]], params)
    texts = [one.text for one in output.outputs]
    for one in output.outputs:
        jsonschema.validate(json.loads(one.text), SCHEMA)
    assert len(set(texts)) > 1
    pieces = {}
    for delta in text_llm.stream(PROMPTS[2], params):
        for one in delta.outputs:
            pieces[one.index] = pieces.get(one.index, "") + one.text
    assert [pieces[i] for i in range(4)] == texts


def test_grammar_survives_a_preemption(text_llm, tiny_checkpoint, byte_tokenizer):
    changes = dict(page_size=16, num_pages=17, max_context_len=192, num_slots=8)
    changes |= dict(decode_batch_sizes=(8,), host_kv_bytes=2**26)
    values = text_llm.engine_config.to_mapping() | changes
    checkpoint = dataclasses.replace(tiny_checkpoint, tokenizer=byte_tokenizer)
    llm = LLM.from_checkpoint(checkpoint, config=EngineConfig.from_mapping(values))
    regex = Structured(regex="([a-f]{2} )*END")
    params = [
        SamplingParams(structured_outputs=regex, max_tokens=60, seed=i, ignore_eos=True)
        for i in range(8)
    ]
    together = _generate(llm, PROMPTS[:8], params)
    assert llm.stats()["counters"]["num_preemptions"] > 0
    for prompt, one, output in zip(PROMPTS, params, together, strict=False):
        (alone,) = _generate(llm, [prompt], one)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert re.match("([a-f]{2} )*", output.outputs[0].text)
    llm.close()


def test_text_that_is_cut_by_its_length_says_so(text_llm):
    params = SamplingParams(structured_outputs=AS_JSON, max_tokens=3)
    (output,) = _generate(text_llm, [[5]], params)
    assert output.outputs[0].finish_reason == "length"
    exact = SamplingParams(structured_outputs=Structured(regex="c{3}"), max_tokens=3)
    (one,) = _generate(text_llm, [[5]], exact)[0].outputs
    assert (one.text, one.finish_reason) == ("ccc", "stop")
    dead = Structured(grammar='start: "a" X\nX: /bc/ & /bd/')
    (one,) = _generate(
        text_llm, [[5]], SamplingParams(structured_outputs=dead)
    )[0].outputs  # fmt: skip
    assert (one.finish_reason, one.text) == ("error", "a")
    assert "dead end" in one.finish_message


def test_a_grammar_that_fails_ends_its_own_request_only(text_llm, monkeypatch):
    real, failing = GrammarState.advance, SamplingParams(
        structured_outputs=Structured(regex="z+"), max_tokens=30, ignore_eos=True
    )  # fmt: skip

    def advance(self, token_id):
        real(self, token_id)
        if self.is_complete and calls.append(1) is None and len(calls) > 4:
            raise ValueError("too complex")

    calls = []
    (alone,) = _generate(text_llm, [PROMPTS[1]], PLAIN)
    monkeypatch.setattr(GrammarState, "advance", advance)
    bad, good = _generate(text_llm, PROMPTS[:2], [failing, PLAIN])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].finish_message == "too complex"
    assert bad.outputs[0].text == "zzzzz" and _bits(good) == _bits(alone)
    assert text_llm._loop._manager.num_used == 0


def test_a_row_without_any_allowed_token_ends_with_an_error(text_llm):
    (alone,) = _generate(text_llm, [PROMPTS[1]], PLAIN)
    a = text_llm.tokenizer.encode("a")[0]
    stuck = SamplingParams(
        structured_outputs=Structured(regex="a+b"), allowed_token_ids=[a + 5]
    )
    late = SamplingParams(allowed_token_ids=[a], bad_words=["aaaa"], max_tokens=9)
    outputs = _generate(text_llm, PROMPTS[:3], [stuck, PLAIN, late])
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error"]
    assert "structured_outputs together forbid" in outputs[0].outputs[0].finish_message
    assert outputs[0].outputs[0].token_ids == []
    assert outputs[2].outputs[0].text == "aaa"
    assert _bits(outputs[1]) == _bits(alone)


def test_bad_words_never_come(text_llm):
    allowed = text_llm.tokenizer.encode("xyz w")
    options = dict(allowed_token_ids=allowed, max_tokens=150, ignore_eos=True)

    def text(**more):
        params = SamplingParams(**options, **more, seed=2, temperature=2.0)
        return _generate(text_llm, [[9]], params)[0].outputs[0].text

    assert all(word in text() for word in ("xy", "w", "zzx", " z"))
    clean = text(bad_words=["xy", "w", "zzx"])
    assert not any(word in clean for word in ("xy", "w", "zzx")) and " z" in clean
    assert "z" not in text(bad_words="z")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(structured_outputs=Structured(regex="(")), "regex must be"),
        (
            dict(structured_outputs=Structured(choice=["ab"] * 50_001)),
            r"at most 100,000 characters \(max_grammar_len\), got 100,002",
        ),
        (dict(bad_words=["x" * 9]), "at most 8 tokens each, got 9"),
        (dict(bad_words=[f"{i:02}" for i in range(20)]), "max_bad_words 16 sequences"),
        (dict(prompt_logprobs=21), r"prompt_logprobs must be in \[0, 20\], got 21"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(text_llm, params, message):
    with pytest.raises(ValueError, match=message):
        text_llm.generate([5], SamplingParams(**params))


def test_rules_of_text_need_a_tokenizer(tiny_llm):
    for params in (
        dict(structured_outputs=AS_JSON),
        dict(bad_words=["a"]),
        dict(stop=["a"]),
    ):
        with pytest.raises(ValueError, match="needs a tokenizer, which"):
            tiny_llm.generate([5], SamplingParams(**params))
    same = SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs
    assert same == Structured(regex="a+")
    for value, message in (
        ("json", "must be StructuredOutputsParams"),
        ({"jsn": {}}, r"must have keys of .*'json', .*got \['jsn'\]"),
        ({"json": {}, "regex": "a"}, "exactly one of"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingParams(structured_outputs=value)


def test_a_stop_id_that_is_text_waits_for_min_tokens(text_llm):
    y = text_llm.tokenizer.encode("y")[0]
    ends = Structured(regex="[xy]{2,9}")
    options = dict(structured_outputs=ends, stop_token_ids=[y], logit_bias={y: 50.0})
    early = SamplingParams(**options)
    late = SamplingParams(**options, min_tokens=4)
    outputs = _generate(text_llm, [[5]] * 2, [early, late])
    texts = [(o.outputs[0].text, len(o.outputs[0].token_ids)) for o in outputs]
    assert texts[0][1] == 1 and texts[1][1] == 5 and texts[1][0].startswith("xxxx")
    assert all(o.outputs[0].stop_reason == y for o in outputs)


def test_a_grammar_is_compiled_while_others_go_on(text_llm, monkeypatch):
    """The engine's lock is free meanwhile, and a turn can be made."""
    real, held = TextRules.resolve, []

    def resolve(self, params):
        def try_lock():
            held.append(text_llm._loop.lock.acquire(timeout=10))
            text_llm._loop.lock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return real(self, params)

    monkeypatch.setattr(TextRules, "resolve", resolve)
    params = SamplingParams(structured_outputs=Structured(regex="a{3}"))
    (output,) = _generate(text_llm, [[1, 2]], params)
    state = text_llm._loop.submit([1, 2], params)
    while not state.is_finished:
        text_llm._loop.turn()
    assert state.output().outputs[0].text == output.outputs[0].text == "aaa"
    assert held == [True, True]
    text_llm._loop.drop(state)


def test_masks_are_read_from_the_step_before_while_forward_runs(text_llm, monkeypatch):
    runner, events = text_llm._runner, []
    while text_llm._loop.has_work:  # a step for nobody, of a request before
        text_llm._loop.turn()
    for name in ("forward", "sample", "read"):
        real = getattr(runner, name)

        def spy(*args, _real=real, _name=name):
            events.append(_name)
            return _real(*args)

        monkeypatch.setattr(runner, name, spy)
    params = SamplingParams(structured_outputs=Structured(regex="a{3}"), max_tokens=9)
    _generate(text_llm, [[1, 2]], params)
    assert events[:8] == ["forward", "sample", *["forward", "read", "sample"] * 2]
    assert events[8:] == ["forward", "read", "sample"]  # the last of them for nobody
