"""Buckets never give more than their rate allows, whatever is asked when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.serving.errors import ServiceError
from headrace.engine.serving.rate_limits import Gate, TokenBucket
from headrace.engine.serving.tenants import Tenant


@given(
    per_minute=st.floats(1, 1e4),
    asks=st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 1e4)), max_size=40),
)
def test_a_bucket_gives_its_rate_and_one_burst_at_most(per_minute, asks):
    bucket, now_s, given_out = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for wait_s, amount in asks:
        now_s += wait_s
        if bucket.wait_s(amount, now_s) == 0:
            bucket.take(amount, now_s)
            given_out += amount
        assert given_out <= per_minute * (1 + now_s / 60) * (1 + 1e-9)


@given(st.floats(1, 1e4), st.floats(0.01, 1), st.floats(0.01, 1))
def test_the_wait_that_is_told_is_enough_and_no_longer(per_minute, first, second):
    bucket = TokenBucket(per_minute, 0.0)
    bucket.take(first * per_minute, 0.0)
    wait_s = bucket.wait_s(second * per_minute, 0.0)
    assert bucket.wait_s(second * per_minute, wait_s) <= 1e-6
    if wait_s > 0.1:
        assert bucket.wait_s(second * per_minute, wait_s - 0.1) > 0


def test_more_than_a_minutes_worth_is_never_given():
    assert TokenBucket(10, 0.0).wait_s(11, 0.0) == float("inf")


def _gate():
    now = [0.0]
    return Gate(clock=lambda: now[0]), now


def test_places_are_given_back_once():
    gate, _ = _gate()
    tenant = Tenant(name="t", max_concurrent=2)
    tickets = [gate.enter(tenant, 5), gate.enter(tenant, 5)]
    with pytest.raises(ServiceError, match="max_concurrent"):
        gate.enter(tenant, 5)
    tickets[0].leave(5)
    tickets[0].leave(5)
    assert gate.num_running("t") == 1
    gate.enter(tenant, 5)
    with pytest.raises(ServiceError, match="max_concurrent"):
        gate.enter(tenant, 5)


def test_unused_tokens_come_back_and_used_ones_with_time():
    gate, now = _gate()
    tenant = Tenant(name="t", tokens_per_minute=60)
    gate.enter(tenant, 60).leave(10)
    gate.enter(tenant, 50).leave(50)
    with pytest.raises(ServiceError) as refused:
        gate.enter(tenant, 20)
    assert refused.value.code == "resource_exhausted"
    assert refused.value.retry_after_s == pytest.approx(20)
    now[0] += 20
    gate.enter(tenant, 20)
    with pytest.raises(ServiceError) as refused:
        gate.enter(tenant, 61)
    assert refused.value.code == "invalid_argument"


def test_a_refused_request_takes_nothing():
    gate, _ = _gate()
    tenant = Tenant(name="t", tokens_per_minute=10, requests_per_minute=2)
    for _ in range(5):
        with pytest.raises(ServiceError):
            gate.enter(tenant, 11)
    gate.enter(tenant, 5)
    gate.enter(tenant, 5)
    with pytest.raises(ServiceError, match="requests_per_minute"):
        gate.enter(tenant, 1)


def test_limits_that_change_count_who_is_running():
    gate, _ = _gate()
    first = gate.enter(Tenant(name="t", max_concurrent=1), 5)
    tighter = Tenant(name="t", max_concurrent=1, tokens_per_minute=100)
    with pytest.raises(ServiceError, match="max_concurrent"):
        gate.enter(tighter, 5)
    first.leave(0)
    assert gate.num_running("t") == 0
    gate.enter(tighter, 100)  # what the old ticket gave back fills no new bucket
    with pytest.raises(ServiceError, match="max_concurrent"):
        gate.enter(tighter, 1)


def test_idle_tenants_are_forgotten_and_running_ones_are_not(monkeypatch):
    monkeypatch.setattr("headrace.engine.serving.rate_limits._MAX_IDLE", 3)
    gate, _ = _gate()
    held = gate.enter(Tenant(name="held"), 1)
    for i in range(20):
        gate.enter(Tenant(name=f"t{i}"), 1).leave(1)
    assert len(gate._accounts) <= 4 and gate.num_running("held") == 1
    held.leave(1)
    assert gate.num_running("held") == 0
