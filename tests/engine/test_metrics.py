"""What dashboards and logs read: each event once, under vLLM's names."""

import bisect
import json
import math
import typing

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from headrace.engine.metrics import Histogram, Metrics, RequestTimes, StepFacts
from headrace.engine.outputs import FinishReason

HISTOGRAMS = set(
    """time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_prefill_time_seconds
    request_decode_time_seconds request_inference_time_seconds request_prompt_tokens
    request_generation_tokens request_params_max_tokens iteration_tokens_total
    batch_efficiency""".split()
)

VALUES = st.floats(-100, 100) | st.integers(-5, 5)


@pytest.fixture
def metrics():
    """Metrics whose clock stands at 100 s, with a log line every 10 s."""
    return Metrics(clock=lambda: 100.0, max_context_len=200)


def _times(**changes):
    """Arrives at 10 s, runs from 12, first token at 15, ends at 27 with 5 tokens."""
    facts = dict(
        arrival_s=10.0, admitted_s=12.0, first_token_s=15.0, finished_s=27.0,
        num_prompt_tokens=30, num_output_tokens=5, max_tokens=64, finish_reason="stop",
    )  # fmt: skip
    return RequestTimes(**(facts | changes))


def _counters(metrics):
    return metrics.snapshot(0, 0, 0.0)["counters"]


def _sums(metrics):
    """{name: (sum, count)} of the histograms that hold values."""
    histograms = metrics.snapshot(0, 0, 0.0)["histograms"].items()
    return {k: (h["sum"], h["count"]) for k, h in histograms if h["count"]}


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.sets(VALUES, min_size=1, max_size=12).map(sorted),
    st.lists(st.tuples(VALUES, st.integers(0, 4)), max_size=40),
)
def test_buckets_are_cumulative_and_agree_with_a_sort(bounds, observed):
    histogram = Histogram(bounds)
    for value, count in observed:
        histogram.observe(value, count)
    ordered = sorted(v for v, count in observed for _ in range(count))
    expected = {str(float(b)): bisect.bisect_right(ordered, b) for b in bounds}
    snapshot = histogram.snapshot()
    assert snapshot["buckets"] == expected | {"+Inf": len(ordered)}
    assert list(snapshot["buckets"]) == [*expected, "+Inf"]
    assert snapshot["count"] == len(ordered)
    assert snapshot["sum"] == pytest.approx(math.fsum(ordered), abs=1e-9)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 8))
def test_quantile_lies_in_the_bucket_of_the_true_one(values, eighths):
    histogram = Histogram(range(5, 51, 5))
    for value in values:
        histogram.observe(value)
    # Eighths, unlike tenths, are exact: no rank slips over a bucket's end.
    place = max(-(-eighths * len(values) // 8), 1) - 1
    high = -(-sorted(values)[place] // 5) * 5
    assert high - 5 <= histogram.quantile(eighths / 8) <= high


def test_value_on_a_bound_belongs_below_it():
    histogram = Histogram([1, 2])
    histogram.observe(1)
    histogram.observe(2.5)
    buckets = {"1.0": 1, "2.0": 1, "+Inf": 2}
    assert histogram.snapshot() == {"buckets": buckets, "sum": 3.5, "count": 2}


def test_quantile_interpolates_and_stops_at_the_largest_bound():
    histogram = Histogram([1, 2, 4])
    assert histogram.quantile(0.5) is None
    histogram.observe(0.5, count=2)
    histogram.observe(3, count=4)
    histogram.observe(100, count=2)
    assert histogram.quantile(0.0) == 0.0
    assert histogram.quantile(0.125) == 0.5
    assert histogram.quantile(0.5) == 3.0
    assert histogram.quantile(0.75) == 4.0
    assert histogram.quantile(1.0) == 4.0
    beyond = Histogram([1, 2])
    beyond.observe(7)
    assert beyond.quantile(0.0) == 2.0


@pytest.mark.parametrize("bounds", [[], [2, 1], [1, 1], [1, math.inf], [math.nan]])
def test_bounds_that_make_no_buckets_are_refused(bounds):
    with pytest.raises(ValueError, match="finite and ascending"):
        Histogram(bounds)


def test_quantile_out_of_range_is_refused():
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"\[0, 1\]"):
            Histogram([1]).quantile(q)


def test_settings_must_be_positive():
    for setting in ("log_interval_s", "max_context_len"):
        with pytest.raises(ValueError, match=setting):
            Metrics(**{setting: 0})


def test_admission_counts_prompt_and_prefix_tokens(metrics):
    metrics.on_admit(prompt_tokens=30, cached_tokens=16, queried_tokens=29)
    metrics.on_admit(prompt_tokens=7, cached_tokens=0, queried_tokens=0)
    counters = _counters(metrics)
    assert not any(counters.pop("request_success").values())
    assert counters == {
        "prompt_tokens": 37, "generation_tokens": 0, "prompt_tokens_cached": 16,
        "prefix_cache_queries": 29, "prefix_cache_hits": 16, "num_preemptions": 0,
    }  # fmt: skip
    assert _sums(metrics) == {}


def test_prompt_computed_again_after_preemption_counts_as_work_only(metrics):
    metrics.on_admit(prompt_tokens=30, cached_tokens=0, queried_tokens=30)
    metrics.on_step(StepFacts(prefill_tokens=30))
    metrics.on_preempt()
    metrics.on_step(StepFacts(prefill_tokens=30))
    counters = _counters(metrics)
    assert (counters["prompt_tokens"], counters["num_preemptions"]) == (30, 1)
    assert _sums(metrics) == {"iteration_tokens_total": (60.0, 2)}


def test_step_counts_output_tokens_and_fill_of_the_decode_bucket(metrics):
    rows = dict(decode_rows=6, decode_bucket_rows=8)
    metrics.on_step(StepFacts(prefill_tokens=20, output_tokens=5, **rows))
    assert _counters(metrics)["generation_tokens"] == 5
    assert _sums(metrics) == {
        "iteration_tokens_total": (25.0, 1),
        "batch_efficiency": (0.75, 1),
    }
    buckets = metrics.histograms["batch_efficiency"].snapshot()["buckets"]
    assert " ".join(buckets) == "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0 +Inf"
    assert list(buckets.values()) == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_step_without_tokens_is_no_iteration_but_its_empty_decode_shows(metrics):
    metrics.on_step(StepFacts())
    metrics.on_step(StepFacts(decode_rows=0, decode_bucket_rows=4))
    assert _sums(metrics) == {"batch_efficiency": (0.0, 1)}


@pytest.mark.parametrize("bucket", [4, None])
def test_step_cannot_decode_more_rows_than_its_bucket(bucket):
    with pytest.raises(AssertionError):
        StepFacts(decode_rows=5, decode_bucket_rows=bucket)


def test_gap_of_many_rows_counts_once_per_row_and_makes_no_tokens(metrics):
    metrics.on_tokens(0.25, num_rows=3)
    metrics.on_first_token(1.5)
    assert _sums(metrics) == {
        "inter_token_latency_seconds": (0.75, 3),
        "time_to_first_token_seconds": (1.5, 1),
    }
    assert _counters(metrics)["generation_tokens"] == 0


def test_finished_request_gives_its_phases(metrics):
    metrics.on_finish(_times())
    assert _sums(metrics) == {
        "e2e_request_latency_seconds": (17.0, 1),
        "request_queue_time_seconds": (2.0, 1),
        "request_prefill_time_seconds": (3.0, 1),
        "request_decode_time_seconds": (12.0, 1),
        "request_inference_time_seconds": (15.0, 1),
        "request_time_per_output_token_seconds": (3.0, 1),
        "request_prompt_tokens": (30.0, 1),
        "request_generation_tokens": (5.0, 1),
        "request_params_max_tokens": (64.0, 1),
    }
    counters = _counters(metrics)
    assert counters["generation_tokens"] == counters["prompt_tokens"] == 0


def test_single_token_has_no_time_per_output_token(metrics):
    metrics.on_finish(_times(num_output_tokens=1, finished_s=15.0))
    sums = _sums(metrics)
    assert "request_time_per_output_token_seconds" not in sums
    assert sums["request_decode_time_seconds"] == (0.0, 1)


def test_request_that_never_ran_gives_queue_time_and_latency_only(metrics):
    times = _times(admitted_s=None, first_token_s=None, finish_reason="cancelled")
    metrics.on_finish(times)
    assert _sums(metrics) == {
        "e2e_request_latency_seconds": (17.0, 1),
        "request_queue_time_seconds": (17.0, 1),
    }
    assert _counters(metrics)["request_success"]["cancelled"] == 1


def test_request_aborted_in_its_prefill_has_no_prefill_or_decode_time(metrics):
    metrics.on_finish(_times(first_token_s=None, num_output_tokens=0))
    sums = _sums(metrics)
    assert sums["request_inference_time_seconds"] == (15.0, 1)
    assert sums["request_generation_tokens"] == (0.0, 1)
    assert not {"request_prefill_time_seconds", "request_decode_time_seconds"} & {*sums}


def test_requests_are_counted_by_the_reason_of_their_end(metrics):
    for reason in ("stop", "length", "stop", "error"):
        metrics.on_finish(_times(finish_reason=reason))
    ends = dict.fromkeys(typing.get_args(FinishReason), 0)
    ends |= {"stop": 2, "length": 1, "error": 1}
    assert _counters(metrics)["request_success"] == ends


def test_snapshot_survives_json_and_what_comes_after_even_with_numpy_counts(metrics):
    metrics.on_admit(np.int64(8), np.int64(4), np.int64(8))
    metrics.on_step(StepFacts(prefill_tokens=np.int64(8), output_tokens=np.int32(1)))
    metrics.on_tokens(0.5, num_rows=np.int64(2))
    metrics.on_finish(_times(arrival_s=np.float32(10)))
    snapshot = metrics.snapshot(np.int64(3), np.int64(1), np.float32(0.5))
    copy = json.loads(json.dumps(snapshot))
    metrics.on_admit(8, 4, 8)
    metrics.on_finish(_times())
    assert copy == snapshot != metrics.snapshot(3, 1, 0.5)
    gauges = {"num_requests_running": 3, "num_requests_waiting": 1}
    assert snapshot["gauges"] == gauges | {"kv_cache_usage_perc": 0.5}
    assert set(snapshot["histograms"]) == HISTOGRAMS


def test_buckets_span_vllms_ranges(metrics):
    histograms = metrics.snapshot(0, 0, 0.0)["histograms"].items()
    bounds = {name: list(h["buckets"]) for name, h in histograms}
    spans = {name: " ".join([b[0], *b[-2:]]) for name, b in bounds.items()}
    assert spans["time_to_first_token_seconds"] == "0.001 2560.0 +Inf"
    assert spans["inter_token_latency_seconds"] == "0.01 80.0 +Inf"
    assert spans["request_time_per_output_token_seconds"] == "0.01 80.0 +Inf"
    assert spans["e2e_request_latency_seconds"] == "0.3 7680.0 +Inf"
    assert spans["iteration_tokens_total"] == "1.0 16384.0 +Inf"


def test_length_buckets_go_up_to_the_context(metrics):
    buckets = metrics.histograms["request_prompt_tokens"].snapshot()["buckets"]
    assert " ".join(buckets) == "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 +Inf"


def test_log_line_tells_rates_since_the_last_one(metrics):
    metrics.on_admit(prompt_tokens=400, cached_tokens=100, queried_tokens=400)
    metrics.on_step(StepFacts(prefill_tokens=300, output_tokens=50))
    assert metrics.log_line(109.9, 3, 1, 0.425) is None
    assert metrics.log_line(120.0, 3, 1, 0.425) == (
        "prompt 15.0 tokens/s, generation 2.5 tokens/s, running 3, waiting 1, "
        "KV cache 42.5%, prefix hits 25.0%"
    )
    metrics.on_step(StepFacts(output_tokens=80))
    assert metrics.log_line(129.9, 1, 0, 0.1) is None
    assert metrics.log_line(130.0, 1, 0, 0.1) == (
        "prompt 0.0 tokens/s, generation 8.0 tokens/s, running 1, waiting 0, "
        "KV cache 10.0%, prefix hits 25.0%"
    )


def test_idle_engine_logs_nothing_and_its_idle_time_dilutes_no_rate(metrics):
    assert metrics.log_line(500.0, 0, 0, 0.0) is None
    metrics.on_step(StepFacts(prefill_tokens=100))
    assert metrics.log_line(505.0, 1, 0, 0.0) is None
    line = metrics.log_line(510.0, 1, 0, 0.0)
    assert line.startswith("prompt 10.0 tokens/s, ")
    assert line.endswith("prefix hits 0.0%")


def test_event_without_tokens_is_worth_a_log_line(metrics):
    metrics.on_preempt()
    assert metrics.log_line(110.0, 0, 2, 1.0).startswith("prompt 0.0 tokens/s")
    metrics.on_finish(_times(admitted_s=None, finish_reason="cancelled"))
    assert "waiting 2, KV cache 100.0%" in metrics.log_line(120.0, 0, 2, 1.0)
    assert metrics.log_line(130.0, 0, 2, 1.0) is None


def test_log_interval_can_be_set():
    metrics = Metrics(log_interval_s=2.0, clock=lambda: 0.0)
    metrics.on_step(StepFacts(output_tokens=4))
    lines = [metrics.log_line(now_s, 1, 0, 0.0) for now_s in (1.9, 2.0)]
    assert lines[0] is None and "generation 2.0 tokens/s" in lines[1]
