"""What ends a completion, as its user sees it: strings, ids, and their text."""

import dataclasses

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.new_request import make_siblings
from headrace.engine.request_state import RequestState


class Letters:
    """A tokenizer of single letters; id 3 is the model's end token."""

    byte_token_ids: frozenset[int] = frozenset()

    def decode(self, ids, *, skip_special_tokens):
        return "".join("abc.defghij"[i] for i in ids)


def told(engine_of, ids, finish=None, **params):
    """Feeds tokens to a completion; returns it and the text after each."""
    engine = engine_of()
    request = engine.request("r", 3, max_tokens=20, **params)
    (completion,) = RequestState(make_siblings(request), Letters()).completions
    texts = []
    for place, token_id in enumerate(ids):
        request.output_token_ids.append(token_id)
        if finish and place == len(ids) - 1:
            engine.scheduler.add(request)
            engine.scheduler.abort("r", finish)
        completion.add_token()
        texts.append(completion.output().text)
    return completion, texts


@pytest.mark.parametrize(("keeps", "text"), [(False, "a"), (True, "abc")])
def test_stop_string_over_two_tokens_is_cut_exactly(engine_of, keeps, text):
    completion, texts = told(
        engine_of, [0, 1, 2], stop=["bc"], include_stop_str_in_output=keeps
    )
    assert texts == ["a", "a", text] and completion.stopped_by == "bc"


def test_what_only_seemed_to_begin_a_stop_string_comes_out_at_the_end(engine_of):
    completion, texts = told(engine_of, [0, 1], stop="bc", finish="length")
    assert texts == ["a", "ab"]
    assert completion.output().finish_reason == "length"


def test_stop_string_in_the_last_token_is_the_reason(engine_of):
    completion, texts = told(engine_of, [0, 1, 2], stop="bc", finish="length")
    output = completion.output()
    assert (output.text, output.finish_reason, output.stop_reason) == (
        "a",
        "stop",
        "bc",
    )


@pytest.mark.parametrize(("keeps", "text"), [(False, "ab"), (True, "ab.")])
def test_stop_token_shows_in_the_text_only_if_asked(engine_of, keeps, text):
    completion, texts = told(
        engine_of, [0, 1, 3], finish="stop", include_stop_str_in_output=keeps
    )
    assert texts[-1] == text and completion.output().token_ids == [0, 1, 3]


def test_stop_strings_count_after_min_tokens(engine_of):
    completion, texts = told(engine_of, [1, 0, 1], stop="b", min_tokens=2)
    assert texts == ["b", "ba", "ba"] and completion.stopped_by == "b"


def test_bad_stops_are_refused(tiny_llm):
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    for value in ["", ["a", ""], 3, [3]]:
        with pytest.raises(ValueError, match="stop must"):
            SamplingParams(stop=value)
    with pytest.raises(ValueError, match="stop needs detokenize"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        tiny_llm.generate([1, 2], SamplingParams(stop="a"))


@pytest.mark.real_model
def test_stop_string_ends_the_request_and_frees_its_place(smollm_llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=40)
    prompt = "The capital of France is"
    (whole,) = smollm_llm.generate(prompt, params, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[12:17]
    params = dataclasses.replace(params, stop=[stop])
    (cut,) = smollm_llm.generate(prompt, params, use_tqdm=False)
    output = cut.outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert len(output.token_ids) < len(whole.outputs[0].token_ids)
    pieces = list(smollm_llm.stream(prompt, params))
    assert "".join(p.outputs[0].text for p in pieces) == output.text
    assert smollm_llm._loop._manager.num_used == 0
