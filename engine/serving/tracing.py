"""Calls as OpenTelemetry traces (extra `otel`): queue, prefill, decode. No jax.

A call is a span of its own with up to three inside, made when it is over. It belongs to
the caller's trace where `traceparent` came with it (W3C Trace Context). The names are
those of OpenTelemetry's conventions for generative AI; no text is in them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from headrace.engine.serving.calls import CallRecord

# Codes of which the caller is not the cause.
_OUR_FAULTS = frozenset(("internal", "unavailable"))


class CallTracer:
    """Makes the spans of calls.

    Args:
      tracer: OpenTelemetry's.
      model_name: that is served.
    """

    def __init__(self, tracer: Any, model_name: str) -> None:
        from opentelemetry.trace.propagation import tracecontext

        self._tracer, self._model_name = tracer, model_name
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def on_call(self, record: CallRecord) -> None:
        """Makes the spans of one call."""
        from opentelemetry import trace

        offset_s = record.wall_s - record.arrival_s

        def ns(time_s: float) -> int:
            return int((time_s + offset_s) * 1e9)

        carrier = {"traceparent": record.trace_parent} if record.trace_parent else {}
        root = self._tracer.start_span(
            f"headrace.{record.method}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=self._attributes(record),
            start_time=ns(record.arrival_s),
        )
        if record.code in _OUR_FAULTS:
            root.set_status(trace.StatusCode.ERROR, record.code)
        inside = trace.set_span_in_context(root)
        for name, begin_s, end_s in _phases(record):
            span = self._tracer.start_span(name, context=inside, start_time=ns(begin_s))
            span.end(ns(end_s))
        assert record.finished_s is not None
        root.end(ns(record.finished_s))

    def _attributes(self, record: CallRecord) -> dict[str, Any]:
        reasons = [record.finish_reason] if record.finish_reason else []
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "headrace.tenant": record.tenant or "",
            "headrace.code": record.code,
        }


def _phases(record: CallRecord) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of what the call went through, in seconds."""
    assert record.finished_s is not None
    if not record.has_run:
        return  # refused, or not of a kind that is followed
    admitted_s, first_s = record.admitted_s, record.first_token_s
    yield "queue", record.arrival_s, admitted_s or record.finished_s
    if admitted_s is not None:
        yield "prefill", admitted_s, first_s or record.finished_s
    if first_s is not None:
        yield "decode", first_s, record.finished_s


@contextlib.contextmanager
def opened(endpoint: str, model_name: str) -> Iterator[CallTracer]:
    """A tracer that exports over OTLP, in a thread of its own; what is left at the end.

    OpenTelemetry's environment variables hold: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and the like.

    Args:
      endpoint: such as "http://localhost:4317".
      model_name: that is served.

    Raises:
      ValueError: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError(f"otlp_endpoint needs the extra `otel`: {error}") from None
    named = Resource({"service.name": "headrace"}).merge(
        OTELResourceDetector().detect()
    )
    provider = TracerProvider(resource=named)
    exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield CallTracer(provider.get_tracer("headrace"), model_name)
    finally:
        provider.shutdown()
