"""Metrics of a run, against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scripts.serving_metrics import (
    Record,
    is_good,
    latency_stats,
    parse_goodput,
    peak_concurrency,
    peak_output_per_s,
    summary,
)

# Sent at 10; tokens at 10.2 (1), 10.3 (1), 10.7 (3): five tokens in three pieces.
FIRST = Record(
    sent_s=10.0, ended_s=10.8, prompt_tokens=7,
    events=((10.2, 1), (10.3, 1), (10.7, 3)),
)  # fmt: skip
# One token, so no time per token and no gap.
SECOND = Record(sent_s=10.5, ended_s=12.0, prompt_tokens=3, events=((11.0, 1),))
FAILED = Record(sent_s=10.6, ended_s=12.5, events=((11.9, 2),), status="HTTP 500")


def test_times_of_one_request_by_hand():
    assert FIRST.ttft_s == pytest.approx(0.2)
    assert FIRST.e2el_s == pytest.approx(0.7)
    assert FIRST.tpot_s == pytest.approx(0.5 / 4)
    assert FIRST.itl_s == pytest.approx([0.1, 0.4])
    assert (SECOND.tpot_s, SECOND.itl_s, SECOND.output_tokens) == (None, [], 1)


def test_summary_by_hand():
    line = summary([FIRST, SECOND, FAILED], {"ttft": 300})
    # From 10.0 to 12.5; the failed request's tokens are not counted.
    assert (line["completed"], line["failed"], line["duration"]) == (2, 1, 2.5)
    assert (line["total_input_tokens"], line["total_output_tokens"]) == (10, 6)
    assert line["request_throughput"] == 0.8
    assert line["output_throughput"] == 2.4
    assert line["total_token_throughput"] == 6.4
    assert line["request_goodput"] == 0.4  # the second's 500 ms are too many
    assert line["max_concurrent_requests"] == 3
    assert line["max_output_tokens_per_s"] == 5
    assert line["mean_ttft_ms"] == line["median_ttft_ms"] == 350.0
    assert line["p95_ttft_ms"] == 485.0 and line["p99_ttft_ms"] == 497.0
    assert line["std_ttft_ms"] == 150.0
    assert line["mean_tpot_ms"] == line["p99_tpot_ms"] == 125.0
    assert (line["mean_itl_ms"], line["std_itl_ms"]) == (250.0, 150.0)
    assert line["mean_e2el_ms"] == 600.0
    assert line["tokens_per_gap"] == 2.0  # four tokens after the first, in two gaps
    assert line["failed_by_reason"] == {"HTTP 500": 1}


def test_a_run_in_which_all_failed_has_counts_and_no_times():
    line = summary([FAILED, FAILED], {"ttft": 1})
    assert (line["completed"], line["failed"]) == (0, 2)
    assert line["failed_by_reason"] == {"HTTP 500": 2}
    assert line["mean_ttft_ms"] is line["p99_itl_ms"] is line["tokens_per_gap"] is None
    assert line["output_throughput"] == line["request_goodput"] == 0


def test_lateness_is_that_of_the_worst_request():
    late = Record(sent_s=11.0, ended_s=12.0, events=((11.5, 1),), late_s=0.25)
    assert summary([FIRST, late, SECOND])["max_late_ms"] == 250.0


def test_goodput_without_limits_is_not_told():
    assert summary([FIRST])["request_goodput"] is None
    assert summary([FIRST], {})["request_goodput"] is None


@pytest.mark.parametrize(
    ("record", "limits", "good"),
    [
        (FIRST, {"ttft": 200.1, "tpot": 125.1, "e2el": 700.1}, True),
        (FIRST, {"ttft": 199}, False),
        (FIRST, {"tpot": 124}, False),
        (FIRST, {"e2el": 699}, False),
        (SECOND, {"tpot": 1}, True),
        (FAILED, {}, False),
    ],
)
def test_a_request_is_good_within_all_limits(record, limits, good):
    assert is_good(record, limits) == good


def test_goodput_is_read():
    assert parse_goodput("ttft:500, tpot:50.5") == {"ttft": 500.0, "tpot": 50.5}
    assert parse_goodput(None) == parse_goodput("") == {}


@pytest.mark.parametrize(
    "text", ["ttft", "itl:5", "ttft:0", "ttft:-1", "ttft:x", "ttft:nan",
             "ttft:1,ttft:2", "ttft:1,,"]
)  # fmt: skip
def test_wrong_goodput_is_refused(text):
    with pytest.raises(ValueError, match="goodput must be name:milliseconds"):
        parse_goodput(text)


def test_a_request_that_ends_as_another_begins_does_not_run_beside_it():
    spans = [(0, 2), (2, 4), (1, 3), (2, 2.5)]
    records = [Record(sent_s=a, ended_s=b) for a, b in spans]
    assert peak_concurrency(records) == 3
    assert peak_concurrency(records[:2]) == 1
    assert peak_concurrency([]) == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=12)
)
def test_peak_concurrency_is_the_most_that_any_moment_sees(spans):
    records = [Record(sent_s=a, ended_s=a + n) for a, n in spans]
    moments = [sum(a <= t < a + n for a, n in spans) for t in range(30)]
    assert peak_concurrency(records) == max(moments)


def test_peak_output_counts_whole_seconds():
    events = ((5.4, 2), (6.39, 3), (6.41, 7))
    record = Record(sent_s=5.4, ended_s=7.0, events=events)
    assert peak_output_per_s([record], 5.4) == 7
    assert peak_output_per_s([record, record], 5.4) == 14
    assert peak_output_per_s([], 0.0) == 0


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=40))
def test_percentiles_are_numpys_and_ascend(values_s):
    line = latency_stats("x", values_s)
    for percent in (50, 95, 99):
        wanted = np.percentile(values_s, percent) * 1e3
        assert line[f"p{percent}_x_ms"] == pytest.approx(wanted, abs=1e-3)
    assert line["median_x_ms"] == line["p50_x_ms"]
    assert line["p50_x_ms"] <= line["p95_x_ms"] <= line["p99_x_ms"]
    assert line["mean_x_ms"] == pytest.approx(np.mean(values_s) * 1e3, abs=1e-3)


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), min_size=1),
        min_size=1,
        max_size=6,
    )
)
def test_sums_of_a_run_hold_for_any_records(runs):
    records = []
    for place, gaps in enumerate(runs):
        times_s = place + np.cumsum([gap for gap, _ in gaps])
        events = tuple(zip(times_s.tolist(), [n for _, n in gaps], strict=True))
        records.append(
            Record(sent_s=float(place), ended_s=events[-1][0], events=events)
        )
    line = summary(records)
    assert line["total_output_tokens"] == sum(n for gaps in runs for _, n in gaps)
    for record in records:
        # The time after the first token, told in two ways.
        rest = (record.tpot_s or 0) * (record.output_tokens - 1)
        if record.output_tokens > 1:
            assert sum(record.itl_s) == pytest.approx(rest, abs=1e-9)
        assert record.ttft_s + sum(record.itl_s) == pytest.approx(record.e2el_s)
    gaps = sum(len(record.itl_s) for record in records)
    if gaps:
        after = sum(n for gaps in runs for _, n in gaps[1:])
        assert line["tokens_per_gap"] == pytest.approx(after / gaps, abs=1e-4)
