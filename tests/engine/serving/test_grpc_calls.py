"""Every method over gRPC gives what the engine itself gives."""

import asyncio
import dataclasses

import grpc
import pytest
from grpc_calls import front, long_request, refusal, server_thread
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import SamplingParams
from headrace.client import AsyncClient, CallError, Client
from headrace.engine.serving.grpc_convert import read_call
from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.proto import generation_pb2 as pb

GREEDY = dict(temperature=0, ignore_eos=True, seed=1)

# Everything that changes an output, in a few requests.
CASES = {
    "greedy": dict(GREEDY, max_tokens=9),
    "seeded": dict(seed=2**63 + 5, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01),
    "several": dict(n=3, seed=4, max_tokens=5),
    "logprobs": dict(GREEDY, max_tokens=4, logprobs=3, prompt_logprobs=2),
    "whole vocabulary": dict(GREEDY, max_tokens=2, logprobs=-1),
    "penalties": dict(
        GREEDY, presence_penalty=1.5, frequency_penalty=-0.3, repetition_penalty=0.01
    ),
    "ids": dict(logit_bias={7: 9.5, 8: -100.0}, allowed_token_ids=[7, 8, 9], seed=1),
    "stop ids": dict(GREEDY, stop_token_ids=[121, 61], min_tokens=2, max_tokens=40),
    "regex": dict(structured_outputs={"regex": "[ab]{3}"}, seed=3),
    "choice": dict(structured_outputs={"choice": ["yes", "no"]}, seed=3),
    "json": dict(
        structured_outputs={"json_object": True, "disable_any_whitespace": True},
        seed=3,
        max_tokens=30,
    ),
    "no text": dict(GREEDY, detokenize=False, skip_special_tokens=False),
    "fills the context": dict(GREEDY, max_tokens=None),
    "bad words": dict(GREEDY, bad_words=["ab", "q"]),
}


@pytest.fixture(scope="module")
def server(chat_checkpoint, tiny_llm):
    with server_thread(chat_checkpoint, tiny_llm) as thread:
        yield thread


@pytest.fixture
def client(server):
    with Client(server.address, timeout_s=60) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
def test_generate_gives_what_the_engine_gives(case, client, text_llm):
    params = SamplingParams(**CASES[case])
    wanted = text_llm.generate("abc", params, use_tqdm=False)[0]
    found = client.generate("abc", params)
    assert found.finished
    assert found.outputs == wanted.outputs
    assert found.prompt_logprobs == wanted.prompt_logprobs
    assert found.prompt_tokens == len(wanted.prompt_token_ids)
    assert found.output_tokens == sum(len(one.token_ids) for one in wanted.outputs)


@pytest.mark.parametrize("case", ["greedy", "several", "logprobs", "json"])
def test_pieces_of_a_stream_add_up_to_the_whole(case, client):
    params = SamplingParams(**CASES[case])
    whole = client.generate("abc", params)
    pieces = list(client.stream("abc", params))
    assert [p.finished for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1 and len({p.request_id for p in pieces}) == 1
    for wanted in whole.outputs:
        parts = [o for p in pieces for o in p.outputs if o.index == wanted.index]
        summed = dataclasses.replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=[i for part in parts for i in part.token_ids],
        )
        if wanted.logprobs is not None:
            summed.logprobs = [x for part in parts for x in part.logprobs or ()]
        assert summed == wanted
        assert all(part.finish_reason is None for part in parts[:-1])
    told = [p.prompt_logprobs for p in pieces if p.prompt_logprobs is not None]
    assert told == ([] if whole.prompt_logprobs is None else [whole.prompt_logprobs])
    assert pieces[-1].prompt_tokens == whole.prompt_tokens
    assert pieces[-1].output_tokens == whole.output_tokens


def test_a_stop_string_ends_the_text_and_is_told(client):
    whole = client.generate("abc", max_tokens=30, **GREEDY)
    stop = whole.text[3:5]
    cut = client.generate("abc", max_tokens=30, stop=stop, **GREEDY).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = client.generate(
        "abc", max_tokens=30, stop=[stop], include_stop_str_in_output=True, **GREEDY
    )
    assert kept.text == cut.text + stop


def test_token_ids_and_conversations_are_prompts_too(client, text_llm):
    params = SamplingParams(max_tokens=5, **GREEDY)
    text = "[user] hi\n[assistant] "
    ids = list(text_llm.tokenizer.encode(text, add_bos=False))
    wanted = text_llm.generate([ids], params, use_tqdm=False)[0].outputs
    assert client.tokenize(text) == ids
    assert client.generate(token_ids=ids, params=params).outputs == wanted
    assert client.generate(ids, params).outputs == wanted
    messages = [{"role": "user", "content": "hi"}]
    assert client.generate(messages=messages, params=params).outputs == wanted


def test_scores_are_the_engines(client, text_llm):
    wanted = text_llm.score("abc", "de", use_tqdm=False)[0]
    found = client.score("abc", "de")
    assert dataclasses.asdict(found) == {
        "token_ids": list(wanted.token_ids),
        "logprobs": list(wanted.logprobs),
        "ranks": list(wanted.ranks),
        "logprob": wanted.logprob,
        "is_greedy": wanted.is_greedy,
    }
    ids = [client.tokenize("abc"), client.tokenize("de")]
    assert client.score(*ids) == found


def test_model_info_tells_the_engines_sizes(client):
    info = client.model_info()
    assert (info.model_name, info.version) == ("tiny", "0.1.0")
    assert (info.max_context_tokens, info.vocab_size) == (512, 512)
    assert info.has_tokenizer and info.has_chat_template and info.scores
    assert info.numerics == "invariant"


def test_cancel_ends_a_stream_with_what_it_has(client):
    stream = client.stream("abc", request_id="mine", max_tokens=400, **GREEDY)
    first = next(stream)
    assert first.request_id == "mine"
    assert not client.cancel("another") and client.cancel("mine")
    *_, last = stream
    assert last.outputs[0].finish_reason == "cancelled" and last.finished
    assert last.output_tokens < 400
    assert not client.cancel("mine")


def test_closing_a_stream_ends_the_request(client, server):
    stream = client.stream("abc", max_tokens=400, **GREEDY)
    next(stream)
    assert server.service.num_calls == 1
    stream.close()
    for _ in range(200):
        if not server.service.num_calls:
            break
        server.run(asyncio.sleep(0.01))
    assert server.service.num_calls == 0
    assert server.stats()["gauges"]["num_requests_running"] == 0


def test_the_async_client_does_the_same(server, client):
    wanted = client.generate("abc", max_tokens=6, **GREEDY)

    async def main():
        async with AsyncClient(server.address, timeout_s=60) as other:
            found = await other.generate("abc", max_tokens=6, **GREEDY)
            pieces = [p async for p in other.stream("abc", max_tokens=6, **GREEDY)]
            assert found.outputs[0].text == wanted.outputs[0].text
            assert "".join(p.text for p in pieces) == wanted.text
            assert await other.score("abc", "de") == client.score("abc", "de")
            assert await other.tokenize("abc") == client.tokenize("abc")
            assert await other.model_info() == client.model_info()
            assert await other.is_serving() and not await other.cancel("x")
            with pytest.raises(CallError) as error:
                await other.generate("")
            assert error.value.code == "INVALID_ARGUMENT"

    asyncio.run(main())


def test_the_client_refuses_what_it_cannot_say(client):
    for wrong in (
        dict(prompt="a", token_ids=[1]),
        dict(),
        dict(prompt="a", temperature=-1.0),
        dict(prompt="a", seed=-1),
        dict(prompt="a", params=SamplingParams(), max_tokens=3),
        dict(prompt="a", params=SamplingParams(output_kind="cumulative")),
    ):
        with pytest.raises(ValueError):
            client.generate(**wrong)
    with pytest.raises(TypeError):
        client.generate("a", temprature=1.0)


def test_absent_fields_have_the_defaults_of_sampling_params():
    call = read_call(pb.GenerateRequest(text="a"), ServiceLimits())
    assert call.params == SamplingParams()
    assert (call.prompt, call.messages, call.uses_cache) == ("a", None, True)
    assert call.deadline_s is None and call.queue_timeout_s is None


def test_reflection_lists_the_services(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="headrace.v1.GenerationService"
            ),
        ]
        listed, file = stub.ServerReflectionInfo(iter(asked))
    names = {one.name for one in listed.list_services_response.service}
    assert names == {
        "headrace.v1.GenerationService", "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }  # fmt: skip
    (descriptor,) = file.file_descriptor_response.file_descriptor_proto
    assert b"GenerateOnce" in descriptor


def test_a_request_id_is_taken_once_at_a_time(serve):
    async def main(service):
        async with front(service) as (_, stub):
            call = stub.Generate(long_request(request_id="r"))
            await call.read()
            error = await refusal(stub.GenerateOnce(long_request(request_id="r")))
            call.cancel()
            return error.code(), error.details()

    code, details = serve(main)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "request_id" in details
