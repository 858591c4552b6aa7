"""OpenAI's bodies: what each field becomes, what is refused, what comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.outputs import CompletionOutput, Logprob, RequestOutput
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.serving.openai_format import (
    CALLERS,
    IGNORED,
    num_top_logprobs,
    prompt_of_body,
    sampling_of_body,
)
from headrace.engine.serving.openai_objects import chat_body, completion_body, usage
from headrace.engine.serving.strict_json import MAX_DEPTH, parse_object

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def sampled(is_chat=True, **body):
    return sampling_of_body(body, is_chat=is_chat)


def test_empty_bodies_have_the_api_s_defaults():
    assert sampled() == SamplingParams(max_tokens=None)
    assert sampled(is_chat=False) == SamplingParams(max_tokens=16)


@pytest.mark.parametrize(
    "body, fields",
    [
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 7, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False, "top_logprobs": None}, {}),
        ({"stop": "x", "seed": 5, "n": 2}, {"stop": "x", "seed": 5, "n": 2}),
        ({"logit_bias": {"7": -2}}, {"logit_bias": {7: -2.0}}),
        ({"presence_penalty": 1, "frequency_penalty": -1},
         {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}},
         {"structured_outputs": {"json_object": True}}),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "strict": True, "schema": SCHEMA}}},
         {"structured_outputs": {"json": SCHEMA}}),
        ({"structured_outputs": {"regex": "a+"}},
         {"structured_outputs": {"regex": "a+"}}),
        ({"top_k": 3, "min_p": 0.1, "ignore_eos": True},
         {"top_k": 3, "min_p": 0.1, "ignore_eos": True}),
        ({"tools": [], "tool_choice": "none", "temperature": None}, {}),
    ],
)  # fmt: skip
def test_chat_fields_become_sampling_parameters(body, fields):
    assert sampled(**body) == SamplingParams(**{"max_tokens": None} | fields)


def test_completion_takes_a_number_of_logprobs():
    params = sampled(is_chat=False, logprobs=3, prompt="x")
    assert params.logprobs == 3 and num_top_logprobs(params) == 3
    with pytest.raises(ValueError, match="logprobs must be 0 or more, got -1"):
        sampled(is_chat=False, logprobs=-1)


@pytest.mark.parametrize("name", sorted(IGNORED | CALLERS))
def test_fields_that_change_no_token_are_taken(name):
    assert sampled(**{name: {"any": "value"}}) == sampled()


@pytest.mark.parametrize(
    "body, message",
    [
        ({"temprature": 1}, "unknown field 'temprature'"),
        ({"reasoning_effort": "low"}, "unknown field 'reasoning_effort'"),
        ({"prompt": "x"}, "unknown field 'prompt'"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"echo": True}, "echo is not supported, got True"),
        ({"best_of": True}, "best_of is not supported, got True"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "must agree"),
        ({"logprobs": 3}, "logprobs must be true or false"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs true"),
        ({"logprobs": True, "top_logprobs": 21}, r"top_logprobs must be in \[0, 20\]"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs must be a whole"),
        ({"stop": ["a"] * 65}, "stop must be at most 64"),
        ({"temperature": 10**400}, "a sampling field has a wrong value"),
        ({"n": "2"}, "n must be a whole number"),
        ({"response_format": {"type": "xml"}}, "response_format must have the type"),
        ({"response_format": "json"}, "response_format must have the type"),
        ({"response_format": {"type": "json_schema"}}, "schema must be an object"),
        ({"response_format": {"type": "json_object"},
          "structured_outputs": {"regex": "a"}}, "must not both be set"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(body, message):
    with pytest.raises(ValueError, match=message):
        sampled(**body)


@pytest.mark.parametrize(
    "prompt, expected",
    [
        ("hi", {"prompt": "hi"}),
        (["hi"], {"prompt": "hi"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([5], {"prompt_token_ids": [5]}),
        ([[1, 2]], {"prompt_token_ids": [1, 2]}),
    ],
)
def test_prompts_of_completions(prompt, expected):
    assert prompt_of_body({"prompt": prompt}, is_chat=False) == expected


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", "b"], [True], [[]], [1, "a"]])
def test_prompts_that_are_none_or_several_are_refused(prompt):
    with pytest.raises(ValueError, match="prompt must be"):
        prompt_of_body({"prompt": prompt}, is_chat=False)


def test_messages_come_as_the_chat_template_takes_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": []},
    ]
    assert prompt_of_body({"messages": messages}, is_chat=True) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "Ann"},
        {"role": "assistant", "content": "ok"},
    ]


@pytest.mark.parametrize(
    "messages, message",
    [
        (None, "messages must be a list of 1 to 4096, got NoneType"),
        ([], "messages must be a list"),
        ([USER] * 4097, "messages must be a list of 1 to 4096, got list of 4097"),
        ([USER, "secret"], r"messages\[1\] must be an object, got str"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].role must be in"),
        ([{"role": "user"}], r"messages\[0\].content must be a string"),
        ([USER | {"content": [{"type": "image_url"}]}], r"content\[0\] must be a part"),
        ([USER | {"content": []}], "must be a string or 1 to 1024 text parts"),
        ([USER | {"tool_calls": [1]}], "a field that is not known: 'tool_calls'"),
        ([USER | {"name": 5}], r"messages\[0\].name must be a string"),
    ],
)
def test_wrong_messages_are_named_and_not_quoted(messages, message):
    with pytest.raises(ValueError, match=message) as caught:
        prompt_of_body({"messages": messages}, is_chat=True)
    assert "secret" not in str(caught.value)


@given(
    st.sampled_from(
        ["messages", "prompt", "n", "stop", "seed", "logit_bias", "logprobs", "tools",
         "top_logprobs", "response_format", "structured_outputs", "max_tokens"]
    ),
    VALUES,
    st.booleans(),
)  # fmt: skip
def test_any_value_is_taken_or_a_value_error(name, value, is_chat):
    for read in (sampling_of_body, prompt_of_body):
        try:
            read({name: value}, is_chat=is_chat)
        except ValueError:
            pass


def output_of(*completions, num_prompt=2):
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=[1] * num_prompt,
        outputs=list(completions), finished=True,
    )  # fmt: skip


def completion(index=0, reason="stop", **fields):
    fields = {"text": "ab", "token_ids": [5, 6]} | fields
    return CompletionOutput(index=index, finish_reason=reason, **fields)


STEPS = [
    {5: Logprob(-2.0, 3, "a"), 9: Logprob(-0.5, 1, "x"), 8: Logprob(-1.0, 2, "y")},
    {6: Logprob(-0.25, 1, "\ufffd"), 7: Logprob(-3.0, 2, None)},
]


def test_chat_object_has_choices_usage_and_logprobs():
    output = output_of(
        completion(logprobs=STEPS), completion(1, "length", token_ids=[4])
    )
    body = chat_body(output, id="c-1", created=7, model="m", num_top=2)
    assert (body["id"], body["object"], body["created"], body["model"]) == (
        "c-1", "chat.completion", 7, "m",
    )  # fmt: skip
    assert "system_fingerprint" not in body
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "length")
    assert (second["index"], second["logprobs"]) == (1, None)
    one, two = first["logprobs"]["content"]
    assert (one["token"], one["logprob"], one["bytes"]) == ("a", -2.0, [97])
    assert [top["token"] for top in one["top_logprobs"]] == ["x", "y"]
    # Half of a character has no bytes to tell, a token without text its id.
    assert two["bytes"] is None
    assert [top["token"] for top in two["top_logprobs"]] == ["\ufffd", "token_id:7"]
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
    }  # fmt: skip


def test_completion_object_numbers_the_choices_of_all_prompts():
    outputs = [output_of(completion(), completion(1)), output_of(completion())]
    body = completion_body(
        outputs, id="c", created=0, model="m", system_fingerprint="fp_1"
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert (body["object"], body["system_fingerprint"]) == ("text_completion", "fp_1")
    assert usage(outputs)["total_tokens"] == 10


def test_completion_logprobs_are_lists_by_place():
    (choice,) = completion_body(
        [output_of(completion(logprobs=STEPS))], id="c", created=0, model="m", num_top=2
    )["choices"]
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "\ufffd"] and found["text_offset"] == [0, 1]
    assert found["token_logprobs"] == [-2.0, -0.25]
    assert found["top_logprobs"][0] == {"a": -2.0, "x": -0.5, "y": -1.0}


@pytest.mark.parametrize("reason", ["error", "rejected", "cancelled"])
def test_failed_completions_have_no_object(reason):
    with pytest.raises(ValueError, match=f"ended with '{reason}'"):
        chat_body(output_of(completion(reason=reason)), id="c", created=0, model="m")


def test_json_is_bounded_in_depth_and_brackets_in_strings_do_not_count():
    deep = b'{"a":' * (MAX_DEPTH - 1) + b"{}" + b"}" * (MAX_DEPTH - 1)
    assert parse_object(deep)
    with pytest.raises(ValueError, match="nest at most 64"):
        parse_object(b'{"a":' + deep + b"}")
    text = b'{"a": "' + rb"[\"[\\" * 100 + b'"}'
    assert parse_object(text) == {"a": '["[\\' * 100}
