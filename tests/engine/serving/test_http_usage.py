"""The OpenAI front as load generators use it: usage, extra fields, many at once."""

import asyncio

import pytest
from http_clients import GREEDY, from_engine

from headrace import SamplingParams


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": True}])
def test_streams_tell_the_usage_where_asked(asked, options):
    async def ask(client):
        fields = {
            "model": "tiny", "prompt": ["abc", "d"], "n": 2, "stream": True,
            "max_tokens": 5, "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        stream = await client.completions.create(**fields)
        plain = [chunk async for chunk in stream]
        stream = await client.completions.create(
            stream_options={"include_usage": True, **options}, **fields
        )
        return plain, [chunk async for chunk in stream]

    plain, chunks = asked(ask)
    assert all(c.usage is None and c.choices for c in plain)
    assert chunks[-1].choices == [] and all(c.choices for c in chunks[:-1])
    assert chunks[-1].usage.prompt_tokens == 3  # "ab" is one token
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.total_tokens == 23
    counts = [c.usage and c.usage.completion_tokens for c in chunks[:-1]]
    if options:
        assert counts == sorted(counts) and counts[0] < counts[-1] == 20
    else:
        assert set(counts) == {None}


def test_fields_of_load_generators_are_taken(asked, text_llm):
    params = SamplingParams(
        temperature=0.7, top_k=5, min_p=0.1, repetition_penalty=1.2, seed=3,
        max_tokens=9, min_tokens=9, ignore_eos=True, stop_token_ids=[5],
        skip_special_tokens=False,
    )  # fmt: skip
    wanted = from_engine(text_llm, "abc", params).outputs[0].text

    async def ask(client):
        extra = {
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 9,
            "ignore_eos": True, "stop_token_ids": [5], "skip_special_tokens": False,
            "best_of": 1, "echo": False, "suffix": None,
        }  # fmt: skip
        return await client.completions.create(
            model="tiny", prompt="abc", temperature=0.7, seed=3, max_tokens=9,
            user="someone", extra_body=extra,
        )  # fmt: skip

    assert asked(ask).choices[0].text == wanted


def test_models_are_listed_with_their_length(asked, text_llm):
    async def ask(client):
        listed = [model async for model in client.models.list()]
        return listed, await client.models.retrieve("tiny")

    (listed,), one = asked(ask)
    assert (listed.id, listed.object) == ("tiny", "model") and listed == one
    assert listed.max_model_len == text_llm.engine_config.max_context_len


def test_many_callers_at_once_get_what_each_would_alone(asked, text_llm):
    prompts = [f"prompt {i}" for i in range(24)]
    wanted = [from_engine(text_llm, p).outputs[0].text for p in prompts]

    async def ask(client):
        async def one(prompt):
            stream = await client.completions.create(
                model="tiny", prompt=prompt, stream=True, **GREEDY
            )
            return "".join([c.choices[0].text async for c in stream])

        return await asyncio.gather(*map(one, prompts))

    assert asked(ask) == wanted
