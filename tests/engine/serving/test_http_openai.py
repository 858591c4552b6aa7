"""OpenAI's own client against the HTTP front, on two layers."""

import json

import jsonschema
import pytest
from http_clients import CHAT_TEXT, GREEDY, MESSAGES, from_engine

from headrace import SamplingParams


def test_completions_equal_the_engine(asked, text_llm):
    wanted = from_engine(text_llm, "abc")

    async def ask(client):
        answer = await client.completions.create(model="tiny", prompt="abc", **GREEDY)
        ids = await client.completions.create(
            model="tiny", prompt=list(wanted.prompt_token_ids), **GREEDY
        )
        return answer, ids

    answer, ids = asked(ask)
    assert answer.choices[0].text == wanted.outputs[0].text != ""
    assert ids.choices[0].text == wanted.outputs[0].text
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.model == "tiny" and answer.id != ids.id
    assert answer._request_id.startswith("req-")
    assert [c.finish_reason for c in answer.choices] == ["length"]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        len(wanted.prompt_token_ids), 8, len(wanted.prompt_token_ids) + 8,
    )  # fmt: skip


def test_chat_goes_through_the_template(asked, text_llm):
    wanted = from_engine(text_llm, CHAT_TEXT)

    async def ask(client):
        return await client.chat.completions.create(
            model="tiny", messages=MESSAGES, **GREEDY
        )

    answer = asked(ask)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted.outputs[0].text)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)


@pytest.mark.parametrize("n", [1, 3])
def test_streams_equal_whole_answers(asked, n):
    fields = {
        "model": "tiny", "n": n, "seed": 7, "temperature": 1.0, "max_tokens": 12,
        "stop": ["zq"],
    }  # fmt: skip

    async def ask(client):
        chats, texts = client.chat.completions, client.completions
        whole_chat = await chats.create(messages=MESSAGES, **fields)
        stream = await chats.create(messages=MESSAGES, stream=True, **fields)
        chat_chunks = [chunk async for chunk in stream]
        whole_text = await texts.create(prompt=["ab", "cd"], **fields)
        stream = await texts.create(prompt=["ab", "cd"], stream=True, **fields)
        return whole_chat, chat_chunks, whole_text, [chunk async for chunk in stream]

    whole_chat, chat_chunks, whole_text, text_chunks = asked(ask)
    assert len({c.id for c in chat_chunks}) == 1 == len({c.id for c in text_chunks})
    assert {c.object for c in chat_chunks} == {"chat.completion.chunk"}
    assert {c.object for c in text_chunks} == {"text_completion"}
    assert len(whole_chat.choices) == n and len(whole_text.choices) == 2 * n
    for choice in whole_chat.choices:
        parts = [
            c.choices[0] for c in chat_chunks if c.choices[0].index == choice.index
        ]
        assert parts[0].delta.role == "assistant" and parts[0].delta.content == ""
        assert {p.delta.role for p in parts[1:]} == {None}
        assert "".join(p.delta.content for p in parts) == choice.message.content
        ends = [p.finish_reason for p in parts]
        assert ends == [None] * (len(ends) - 1) + [choice.finish_reason]
        assert len(parts) > 3  # it came in pieces
    for choice in whole_text.choices:
        parts = [
            c.choices[0] for c in text_chunks if c.choices[0].index == choice.index
        ]
        assert "".join(p.text for p in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason


def test_several_prompts_are_numbered_by_prompt(asked, text_llm):
    prompts = ["abc", "x", "hello there"]
    wanted = [from_engine(text_llm, p) for p in prompts]

    async def ask(client):
        texts = await client.completions.create(model="tiny", prompt=prompts, **GREEDY)
        ids = [list(one.prompt_token_ids) for one in wanted]
        return texts, await client.completions.create(
            model="tiny", prompt=ids, **GREEDY
        )

    for answer in asked(ask):
        assert [c.index for c in answer.choices] == [0, 1, 2]
        assert [c.text for c in answer.choices] == [w.outputs[0].text for w in wanted]
        assert answer.usage.completion_tokens == 24
        prompt_tokens = sum(len(w.prompt_token_ids) for w in wanted)
        assert answer.usage.prompt_tokens == prompt_tokens


def test_n_completions_have_a_seed_and_their_order(asked, text_llm):
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    outputs = [from_engine(text_llm, p, params).outputs for p in ("a", "b")]
    wanted = [one.text for several in outputs for one in several]

    async def ask(client):
        return await client.completions.create(
            model="tiny", prompt=["a", "b"], n=3, seed=5, max_tokens=8,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    answer = asked(ask)
    assert [c.text for c in answer.choices] == wanted and len(set(wanted)) > 3
    assert [c.index for c in answer.choices] == list(range(6))


def _steps(completion):
    return list(zip(completion.token_ids, completion.logprobs, strict=True))


def test_logprobs_are_the_engines(asked, text_llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    texts = _steps(from_engine(text_llm, "abc", params).outputs[0])
    chats = _steps(from_engine(text_llm, CHAT_TEXT, params).outputs[0])

    async def ask(client):
        fields = {"model": "tiny", "prompt": "abc", "logprobs": 3, **GREEDY}
        text = await client.completions.create(**fields)
        stream = await client.completions.create(stream=True, **fields)
        pieces = [c.choices[0].logprobs async for c in stream]
        fields = {"model": "tiny", "messages": MESSAGES, "logprobs": True, **GREEDY}
        chat = await client.chat.completions.create(top_logprobs=3, **fields)
        stream = await client.chat.completions.create(
            top_logprobs=3, stream=True, **fields
        )
        chunks = [c.choices[0].logprobs async for c in stream]
        bare = await client.chat.completions.create(**fields)
        return text, pieces, chat, chunks, bare

    text, pieces, chat, chunks, bare = asked(ask)
    found = text.choices[0].logprobs
    assert found.token_logprobs == [step[i].logprob for i, step in texts]
    assert found.tokens == [step[i].decoded_token for i, step in texts]
    for top, (_, step) in zip(found.top_logprobs, texts, strict=True):
        assert set(top.values()) <= {one.logprob for one in step.values()}
        assert max(top.values()) == max(one.logprob for one in step.values())
    starts = [sum(map(len, found.tokens[:i])) for i in range(8)]
    assert found.text_offset == starts
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [x for piece in pieces for x in getattr(piece, name)]
        assert told == getattr(found, name)
    content = chat.choices[0].logprobs.content
    assert [c.logprob for c in content] == [step[i].logprob for i, step in chats]
    assert [c.token for c in content] == [step[i].decoded_token for i, step in chats]
    for one, (_, step) in zip(content, chats, strict=True):
        likeliest = sorted((x.logprob for x in step.values()), reverse=True)
        assert [t.logprob for t in one.top_logprobs] == likeliest[:3]
    assert [x for c in chunks if c for x in c.content] == content
    assert [c.top_logprobs for c in bare.choices[0].logprobs.content] == [[]] * 8


def test_stop_strings_end_the_text(asked, text_llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = from_engine(text_llm, "abc", params).outputs[0].text
    assert whole.count("aaa") > 1

    async def ask(client):
        fields = {
            "model": "tiny", "prompt": "abc", "stop": ["never", "aaa"],
            **GREEDY, "max_tokens": 20,
        }  # fmt: skip
        stream = await client.completions.create(stream=True, **fields)
        pieces = [c.choices[0] async for c in stream]
        return (await client.completions.create(**fields)).choices[0], pieces

    choice, pieces = asked(ask)
    assert choice.text == whole[: whole.index("aaa")]
    assert choice.finish_reason == "stop" == pieces[-1].finish_reason
    assert "".join(p.text for p in pieces) == choice.text


def test_json_schemas_are_kept(asked):
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
        },
        "required": ["kind", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}

    async def ask(client):
        chats = client.chat.completions
        fields = {
            "model": "tiny", "messages": MESSAGES, "max_tokens": 300, "seed": 1,
            "extra_body": {"logit_bias": {str(i + 1): -100 for i in (188, 189, 220)}},
        }  # fmt: skip
        whole = await chats.create(response_format=wanted, n=2, **fields)
        free = await chats.create(
            response_format={"type": "json_object"}, temperature=1.0, **fields
        )
        bad = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": 3}},
        }
        with pytest.raises(Exception) as error:
            await chats.create(response_format=bad, **fields)
        return whole, free, error.value

    whole, free, error = asked(ask)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    if free.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(free.choices[0].message.content), dict)
    assert free.choices[0].message.content.lstrip().startswith("{")
    assert error.status_code == 400
