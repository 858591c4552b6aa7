"""A call as spans: its phases follow each other inside it, in the caller's trace."""

import pytest
from grpc_calls import front, request
from http_clients import http_client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from headrace import SamplingParams
from headrace.engine.serving import tracing
from headrace.engine.serving.calls import Call, CallRecord
from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.tenants import ANONYMOUS
from headrace.engine.serving.tracing import CallTracer

SECRET = "a secret in the prompt"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture
def traced():
    """(tracer, spans()): what was traced so far, roots last."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield CallTracer(provider.get_tracer("test"), "m"), exporter.get_finished_spans
    provider.shutdown()


def test_phases_fill_the_call_from_arrival_to_end(serve, traced):
    tracer, spans = traced

    async def main(service):
        call = Call(prompt=SECRET, params=PARAMS, request_id="mine")
        await service.generate(ANONYMOUS, call)

    serve(main, observers=[tracer])
    *phases, root = spans()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert root.name == "headrace.generate" and root.parent is None
    edges = [root.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == edges[:-1]
    assert edges == sorted(edges) and edges[-1] == root.end_time
    assert {span.parent.span_id for span in phases} == {root.context.span_id}
    assert dict(root.attributes) == {
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(SECRET),
        "gen_ai.usage.output_tokens": 6,
        "headrace.tenant": "anonymous",
        "headrace.code": "ok",
    }
    assert all(SECRET not in span.to_json() for span in spans())


@pytest.mark.parametrize("is_http", [False, True])
def test_a_call_belongs_to_its_callers_trace_and_the_next_does_not(
    serve, traced, is_http
):
    tracer, spans = traced
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 2}

    async def over_grpc(service):
        async with front(service) as (_, stub):
            await stub.GenerateOnce(request(), metadata=tuple(HEADER.items()))
            await stub.GenerateOnce(request())

    async def over_http(service):
        async with http_client(service) as client:
            for headers in (HEADER, {}):
                answer = await client.post(
                    "/v1/completions", json=body, headers=headers
                )
                assert answer.status_code == 200

    serve(over_http if is_http else over_grpc, observers=[tracer])
    first, other = [s for s in spans() if s.name == "headrace.generate"]
    assert f"{first.context.trace_id:032x}" == TRACE
    assert f"{first.parent.span_id:016x}" == PARENT
    assert other.parent is None and other.context.trace_id != first.context.trace_id


def test_a_refused_call_has_no_phases_and_is_not_the_servers_fault(serve, traced):
    tracer, spans = traced

    async def main(service):
        with pytest.raises(ServiceError):
            await service.generate(ANONYMOUS, Call(prompt="a", messages=[]))

    serve(main, observers=[tracer])
    (root,) = spans()
    assert root.attributes["headrace.code"] == "invalid_argument"
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("broken", ["", "x", f"00-{'0' * 32}-{PARENT}-01", "\x00" * 99])
def test_what_is_no_trace_parent_begins_a_trace(traced, broken):
    tracer, spans = traced
    tracer.on_call(_record(code="internal", trace_parent=broken))
    (root,) = spans()
    assert root.parent is None and root.status.status_code is StatusCode.ERROR


def test_a_call_that_never_got_a_token_ends_in_its_last_phase(traced):
    tracer, spans = traced
    tracer.on_call(_record(has_run=True))
    tracer.on_call(_record(has_run=True, admitted_s=3.0))
    found = [(s.name, s.start_time, s.end_time) for s in spans() if s.parent]
    second = 10**9
    assert found == [
        ("queue", 101 * second, 105 * second),
        ("queue", 101 * second, 103 * second),
        ("prefill", 103 * second, 105 * second),
    ]


def _record(**fields):
    """Arrived at 1 of the engine's clock, 101 of the epoch's; over at 5."""
    return CallRecord(
        request_id="1", tenant="a", method="generate", wall_s=101.0, arrival_s=1.0,
        finished_s=5.0, **fields,
    )  # fmt: skip


def test_without_the_extra_it_says_so(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc", None
    )
    with pytest.raises(ValueError, match="otlp_endpoint needs the extra `otel`"):
        with tracing.opened("http://localhost:4317", "m"):
            pass
