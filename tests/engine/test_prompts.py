"""What users pass as prompts and as sampling parameters, right and wrong."""

import numpy as np
import pytest

from headrace.engine.new_request import _checked_ids
from headrace.engine.prompts import (
    Prompt,
    as_prompt,
    as_prompt_or_error,
    as_prompts,
    as_prompts_or_errors,
    spread_params,
)
from headrace.engine.sampling_params import SamplingParams


def ids_of(prompts):
    return [list(prompt.token_ids) for prompt in as_prompts(prompts)]


def test_flat_numbers_are_one_prompt():
    one = [[1, 2, 3]]
    assert ids_of([1, 2, 3]) == ids_of((1, 2, 3)) == ids_of(range(1, 4)) == one
    assert ids_of(np.array([1, 2, 3])) == ids_of(list(np.array([1, 2, 3]))) == one
    assert ids_of([np.array(1), np.array(2), np.array(3)]) == one


def test_each_array_in_a_list_is_a_prompt():
    """Arrays have `__index__`: a list of them was once taken for one prompt."""
    assert ids_of([np.array([1, 2, 3]), np.array([4, 5])]) == [[1, 2, 3], [4, 5]]
    assert ids_of([np.array([7])]) == [[7]]
    assert ids_of([np.array([1]), [2, 3]]) == [[1], [2, 3]]


def test_mapping_takes_text_ids_or_an_array_of_ids():
    assert as_prompts({"prompt": "a"}) == [Prompt(text="a")]
    assert ids_of({"prompt_token_ids": np.array([1, 2])}) == [[1, 2]]
    assert ids_of({"prompt": None, "prompt_token_ids": (1,)}) == [[1]]


@pytest.mark.parametrize(
    "prompt, message",
    [
        ({"prompt_token_ids": 5}, "'prompt_token_ids' must be a list .*, got 5"),
        ({"prompt_token_ids": np.int64(5)}, "must be a list .*, got 5"),
        ({"prompt_token_ids": "5 6"}, "must be a list .*, got '5 6'"),
        ({"prompt_token_ids": {5: 6}}, "must be a list .*, got {5: 6}"),
        ({"prompt_token_ids": None}, "needs a value, got None"),
        ({"prompt": 5}, "'prompt' must be a str, got int"),
        ({"prompt": "a", 5: 6}, r"has the keys .* got \['prompt', 5\]"),
        (5, "a prompt is a str, .* got int"),
        (None, "got NoneType"),
        (b"", "got bytes"),
        (bytearray(b"ab"), "got bytearray"),
    ],
)
def test_wrong_prompt_is_refused_alone_and_is_an_error_of_its_own_in_a_list(
    prompt, message
):
    with pytest.raises(ValueError, match=message):
        as_prompt(prompt)
    with pytest.raises(ValueError, match=message):
        as_prompts(prompt)
    with pytest.raises(ValueError, match=message):
        as_prompts_or_errors(prompt)
    with pytest.raises(ValueError, match=message):
        as_prompts(["good", prompt])
    assert isinstance(as_prompt_or_error(prompt), ValueError)
    good, bad, last = as_prompts_or_errors(["good", prompt, [1]])
    assert (good, last) == (Prompt(text="good"), Prompt(token_ids=[1]))
    with pytest.raises(ValueError, match=message):
        raise bad


@pytest.mark.parametrize("name", ["prompt_token_ids", "stop_token_ids"])
def test_number_in_place_of_ids_is_named(name):
    with pytest.raises(ValueError, match=f"{name} must be a list .*, got 5"):
        _checked_ids(name, 5, vocab_size=9)


def test_one_or_none_is_for_all_prompts_and_a_list_is_one_for_each():
    cold, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)
    assert spread_params(None, 2) == [SamplingParams()] * 2
    assert spread_params(cold, 2) == [cold, cold]
    assert spread_params((cold, warm), 2) == [cold, warm]
    with pytest.raises(ValueError, match="3 prompts, 2 params"):
        spread_params([cold, warm], 3)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"temperature": 0.0}, "must be a SamplingParams .* got dict {'temperature'"),
        (0.5, "got float 0.5"),
        ("greedy", "got str 'greedy'"),
        ([None], "SamplingParams only, got NoneType None at place 0"),
        ([SamplingParams(), {"top_k": 1}], "got dict {'top_k': 1} at place 1"),
    ],
)
def test_anything_but_sampling_params_is_refused(params, message):
    with pytest.raises(ValueError, match=message):
        spread_params(params, 1)
