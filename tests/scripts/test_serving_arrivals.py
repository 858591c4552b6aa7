"""Arrival times: their mean, spread and order, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scripts.serving_arrivals import gamma_arrivals, replayed

RATES = st.floats(0.1, 1000)
SHAPES = st.floats(0.2, 20)


@settings(max_examples=30, deadline=None)
@given(rate=RATES, burstiness=SHAPES, seed=st.integers(0, 2**32))
def test_gaps_have_the_mean_and_spread_that_were_asked(rate, burstiness, seed):
    gaps = np.diff(gamma_arrivals(20_001, rate, burstiness, seed))
    cv = 1 / math.sqrt(burstiness)
    # Five standard errors of the mean of 20,000 gaps.
    assert gaps.mean() * rate == pytest.approx(1, abs=5 * cv / math.sqrt(20_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.2)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 50), rate=RATES, burstiness=SHAPES)
def test_arrivals_start_at_0_ascend_and_are_as_many_as_asked(count, rate, burstiness):
    times_s = gamma_arrivals(count, rate, burstiness, 0)
    assert len(times_s) == count and times_s == sorted(times_s)
    assert times_s[:1] == [0.0][:count]


def test_a_seed_gives_the_same_times_again_and_another_gives_others():
    first = gamma_arrivals(9, 2.0, 1.0, 7)
    assert first == gamma_arrivals(9, 2.0, 1.0, 7)
    assert first != gamma_arrivals(9, 2.0, 1.0, 8)


def test_infinite_rate_sends_all_at_once():
    assert gamma_arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "burstiness", "message"),
    [
        (0, 1, "request_rate must be above 0"),
        (-1, 1, "got -1"),
        (math.nan, 1, "request_rate"),
        (1, 0, "burstiness must be above 0"),
        (1, math.inf, "finite, got inf"),
        (math.inf, math.nan, "burstiness"),
    ],
)
def test_values_out_of_range_are_refused(rate, burstiness, message):
    with pytest.raises(ValueError, match=message):
        gamma_arrivals(3, rate, burstiness, 0)


def test_recorded_times_begin_at_0_and_keep_their_gaps():
    assert replayed([1700.5, 1700.5, 1702.0]) == [0.0, 0.0, 1.5]
    assert replayed([]) == []


@pytest.mark.parametrize("times_s", [[2.0, 1.0], [0.0, math.nan], [math.inf]])
def test_recorded_times_out_of_order_are_refused_by_their_place(times_s):
    with pytest.raises(ValueError, match=f"at request {len(times_s) - 1}"):
        replayed(times_s)
