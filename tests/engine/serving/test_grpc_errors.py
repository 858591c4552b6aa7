"""Every wrong call gets the status that gRPC means for it, and the server lives on."""

import grpc
import hypothesis
import pytest
from grpc_calls import front, refusal, request, server_thread
from hypothesis import strategies as st

from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.proto import generation_pb2 as pb
from headrace.engine.serving.proto import generation_pb2_grpc as stubs

NAN, INF = float("nan"), float("inf")
LIMITS = ServiceLimits(
    max_prompt_tokens=40, max_prompt_chars=50, max_messages=2, max_tokens=20, max_n=2,
    max_logprobs=3, max_stop_strings=2, max_stop_chars=8, max_bias_entries=2,
    max_grammar_chars=30, max_deadline_s=60,
)  # fmt: skip
CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def server(chat_checkpoint, tiny_llm):
    with server_thread(chat_checkpoint, tiny_llm, limits=LIMITS) as thread:
        yield thread


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return stubs.GenerationServiceStub(channel)


def code_of(method, message):
    """(code, details) of a call in a thread of its own; (OK, "") where it is served."""
    try:
        found = method(message, timeout=20)
        list(found) if hasattr(found, "cancel") else found
    except grpc.RpcError as error:
        return error.code(), error.details()
    return CODE.OK, ""


def structured(**fields):
    return request(structured_outputs=pb.StructuredOutputs(**fields))


def plain(**fields):
    return pb.GenerateRequest(**{"text": "a"} | fields)


def chat(*messages):
    return pb.GenerateRequest(conversation=pb.Conversation(messages=messages))


USER = pb.Message(role="user", content="a")
# (what the details name, the message)
MALFORMED = [
    ("prompt", pb.GenerateRequest()),
    ("prompt", pb.GenerateRequest(text="")),
    ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds())),
    ("prompt", plain(text="a" * 51)),
    ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 41))),
    ("prompt", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 10**6))),
    ("prompt_token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[512]))),
    ("prompt_token_ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[-1]))),
    ("messages", chat()),
    ("messages", chat(USER, USER, USER)),
    ("messages", chat(*[pb.Message()] * 10**5)),
    ("prompt", chat(pb.Message(role="user", content="a" * 40))),
    ("request_id", plain(request_id="")),
    ("request_id", plain(request_id="a" * 129)),
    ("request_id", plain(request_id="a\nlevel=error")),
    *[("deadline_s", plain(deadline_s=x)) for x in (0.0, -1.0, NAN, INF, 61.0)],
    *[("queue_timeout_s", plain(queue_timeout_s=x)) for x in (0.0, -1.0, NAN, INF)],
    *[("temperature", request(temperature=x)) for x in (-1.0, 0.001, 101, NAN, INF)],
    *[("top_p", request(top_p=x)) for x in (0.0, 1.1, NAN, -INF)],
    *[("top_k", request(top_k=x)) for x in (-2, -(2**31))],
    *[("min_p", request(min_p=x)) for x in (-0.1, 1.1, NAN)],
    *[("presence_penalty", request(presence_penalty=x)) for x in (-2.1, 2.1, NAN)],
    *[("frequency_penalty", request(frequency_penalty=x)) for x in (-3.0, INF)],
    *[("repetition_penalty", request(repetition_penalty=x)) for x in (0.0, 101, NAN)],
    *[("max_tokens", request(max_tokens=x)) for x in (0, -1, 21, 2**31 - 1)],
    ("max_tokens", request(fills_context=True)),
    *[("min_tokens", request(min_tokens=x)) for x in (-1, 7)],
    *[("n", request(n=x, temperature=1)) for x in (0, -1, 3, 2**31 - 1)],
    ("n", request(n=2)),  # greedy
    ("stop", request(stop=["a"] * 3)),
    ("stop", request(stop=["a" * 9])),
    ("stop", request(stop=[""])),
    ("stop", request(stop=["a"], detokenize=False)),
    ("stop_token_ids", request(stop_token_ids=[-1])),
    ("stop_token_ids", request(stop_token_ids=[512])),
    ("stop_token_ids", request(stop_token_ids=range(30))),
    ("stop_token_ids", request(stop_token_ids=range(100))),
    *[("logprobs", request(logprobs=x)) for x in (-2, -1, 4)],
    *[("prompt_logprobs", request(prompt_logprobs=x)) for x in (-1, 4)],
    *[("logit_bias", request(logit_bias={1: x})) for x in (NAN, INF, 100.1)],
    *[("logit_bias", request(logit_bias={x: 1.0})) for x in (-1, 512)],
    ("logit_bias", request(logit_bias={x: 1.0 for x in range(3)})),
    ("allowed_token_ids", request(allowed_token_ids=[1, 2, 3])),
    ("allowed_token_ids", request(allowed_token_ids=[512])),
    ("bad_words", request(bad_words=["a"] * 3)),
    ("bad_words", request(bad_words=[""])),
    ("structured_outputs", structured()),
    ("structured_outputs", structured(json_object=False)),
    ("structured_outputs", structured(json="{")),
    ("structured_outputs", structured(json='["no", "object"]')),
    ("structured_outputs", structured(json="[" * 30)),
    ("structured_outputs", structured(regex="")),
    ("structured_outputs", structured(regex="a" * 31)),
    ("regex", structured(regex="(")),
    ("structured_outputs", structured(choice=pb.StructuredOutputs.Choices())),
    ("structured_outputs", structured(grammar="a" * 31)),
    ("grammar", structured(grammar="start: (")),
    ("structured_outputs", structured(regex="a", disable_any_whitespace=True)),
]  # fmt: skip


@pytest.mark.parametrize(
    "field, message", MALFORMED, ids=[f"{i}-{m[0]}" for i, m in enumerate(MALFORMED)]
)
def test_a_malformed_field_is_named_and_costs_no_step(field, message, server, stub):
    steps = server.stats()["histograms"]["iteration_tokens_total"]["count"]
    code, details = code_of(stub.GenerateOnce, message)
    assert code is CODE.INVALID_ARGUMENT
    assert field in details and len(details) <= 1000
    assert code_of(stub.Generate, message) == (code, details)
    after = server.stats()["histograms"]["iteration_tokens_total"]["count"]
    assert after == steps


@pytest.mark.parametrize(
    "method, message",
    [
        ("Score", pb.ScoreRequest()),
        ("Score", pb.ScoreRequest(prompt_text="a")),
        ("Score", pb.ScoreRequest(prompt_text="a", continuation_text="")),
        ("Score", pb.ScoreRequest(prompt_text="", continuation_text="a")),
        ("Score", pb.ScoreRequest(prompt_text="a" * 51, continuation_text="a")),
        (
            "Score",
            pb.ScoreRequest(prompt_text="a", continuation_ids=pb.TokenIds(ids=[999])),
        ),
        (
            "Score",
            pb.ScoreRequest(prompt_ids=pb.TokenIds(ids=[-1]), continuation_text="a"),
        ),
        ("Tokenize", pb.TokenizeRequest(text="a" * 51)),
    ],
)
def test_other_methods_refuse_their_fields_too(method, message, stub):
    assert code_of(getattr(stub, method), message)[0] is CODE.INVALID_ARGUMENT


def test_an_unknown_method_is_unimplemented(channel):
    method = channel.unary_unary("/headrace.v1.GenerationService/Nothing")
    assert code_of(method, b"")[0] is CODE.UNIMPLEMENTED


def test_text_that_is_no_utf8_is_an_invalid_argument(channel):
    method = channel.unary_unary("/headrace.v1.GenerationService/GenerateOnce")
    code, details = code_of(method, b"\x0a\x02\xc3\x28")
    assert code is CODE.INVALID_ARGUMENT and "UTF-8" in details


def test_a_message_over_the_bound_is_refused(serve):
    async def main(service):
        async with front(service, max_message_bytes=10_000) as (_, stub):
            small = await stub.Tokenize(pb.TokenizeRequest(text="a" * 9_000))
            error = await refusal(stub.Tokenize(pb.TokenizeRequest(text="a" * 11_000)))
            # As is a response: 300 tokens with 20 log-probabilities each.
            big = request(max_tokens=300, logprobs=20)
            assert (await refusal(stub.GenerateOnce(big))).code() is error.code()
            return len(small.token_ids), error.code()

    assert serve(main) == (9_000, CODE.RESOURCE_EXHAUSTED)


FINE = {CODE.OK, CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED}
FUZZ = hypothesis.settings(max_examples=120, deadline=None)
INT32 = st.one_of(st.integers(-2, 5), st.integers(-(2**31), 2**31 - 1))
NUMBER = st.one_of(st.floats(0, 2), st.floats())
TEXTS = st.lists(st.text(max_size=4), max_size=3)
IDS = st.lists(st.one_of(st.integers(0, 300), INT32), max_size=3)
FIELDS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty"), NUMBER),
    **dict.fromkeys(("frequency_penalty", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("top_k", "max_tokens", "min_tokens", "n", "logprobs"), INT32),
    "prompt_logprobs": INT32,
    "seed": st.integers(0, 2**64 - 1),
    **dict.fromkeys(("stop", "bad_words"), TEXTS),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), IDS),
    **dict.fromkeys(("ignore_eos", "detokenize", "fills_context"), st.booleans()),
    "logit_bias": st.dictionaries(INT32, NUMBER, max_size=2),
    "structured_outputs": st.one_of(
        st.builds(lambda x: pb.StructuredOutputs(regex=x), st.text(max_size=6)),
        st.builds(lambda x: pb.StructuredOutputs(json=x), st.text(max_size=6)),
        st.builds(lambda x: pb.StructuredOutputs(grammar=x), st.text(max_size=12)),
    ),
}  # fmt: skip
PARAMS = st.fixed_dictionaries({}, optional=FIELDS)


@FUZZ
@hypothesis.given(
    PARAMS.flatmap(
        # All fields at once are hardly ever valid: mostly a few of them.
        lambda values: st.sets(
            st.sampled_from(sorted(values) or ["n"]), max_size=3
        ).map(lambda names: {name: values[name] for name in names if name in values})
    )
)
def test_any_parameters_are_served_or_refused(stub, values):
    message = pb.GenerateRequest(
        text="abc", params=pb.SamplingParams(**values), deadline_s=0.05
    )
    code, details = code_of(stub.GenerateOnce, message)
    assert code in FINE, details


@FUZZ
@hypothesis.given(
    st.sampled_from(
        ["Generate", "GenerateOnce", "Score", "Tokenize", "ModelInfo", "Cancel"]
    ),
    st.one_of(
        st.binary(max_size=40),
        st.tuples(st.integers(0, 60), st.binary(min_size=1, max_size=3)).map(
            lambda change: _with(request().SerializeToString(), *change)
        ),
    ),
)
def test_any_bytes_are_served_or_refused(channel, method, content):
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = kind(f"/headrace.v1.GenerationService/{method}")
    code, details = code_of(call, content)
    assert code in FINE, details


def _with(content, place, change):
    """A message with some bytes replaced."""
    return content[:place] + change + content[place + len(change) :]


def test_the_server_is_alive_after_all_that(server, stub):
    assert code_of(stub.GenerateOnce, request()) == (CODE.OK, "")
    assert server.stats()["gauges"]["num_requests_running"] == 0
    assert server.service.num_calls == 0
