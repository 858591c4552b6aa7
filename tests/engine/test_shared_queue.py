"""The queue's places are shared: a flood leaves room for the other tenants."""

import itertools

import pytest

from headrace.engine.admission import QueueFullError

BUSY = {"num_slots": 1, "decode_batch_sizes": (1,), "num_pages": 33}


NAMES = itertools.count()


@pytest.fixture
def full_engine(engine_of):
    """full_engine(**changes): one request runs, and nothing waits."""

    def make(**changes):
        engine = engine_of(**BUSY, **changes)
        engine.add(engine.request("runs", 5, 40, fields={"tenant": "z"}))
        engine.run_until_decode()
        return engine

    return make


def _flood(engine, tenant, prompt_len=5, most=100, **params):
    """How many requests of a tenant the queue takes."""
    for count in range(most):
        name, fields = f"{tenant}{next(NAMES)}", {"tenant": tenant}
        try:
            engine.add(engine.request(name, prompt_len, 2, fields=fields, **params))
        except QueueFullError:
            return count
    return most


def _waiting(engine, *tenants):
    queue = engine.scheduler._life.admission.queue
    return [queue.waiting_of(tenant)[0] for tenant in tenants]


@pytest.mark.parametrize("policy", ["fair", "fcfs", "priority"])
def test_a_flood_fills_half_of_the_queue_and_others_get_in(full_engine, policy):
    engine = full_engine(max_queued_requests=12, share_queue=True, policy=policy)
    assert _flood(engine, "a") == 6
    assert _flood(engine, "b", most=1) == 1
    with pytest.raises(QueueFullError, match="12 it has 6, 5 are left"):
        engine.add(engine.request("more", 5, fields={"tenant": "a"}))
    engine.run()
    assert _waiting(engine, "a", "b", "z") == [0, 0, 0]
    assert not engine.scheduler._life.admission.queue._waiting
    engine.check_end()


def test_without_sharing_a_flood_locks_the_others_out(full_engine):
    engine = full_engine(max_queued_requests=12, policy="fair")
    assert _flood(engine, "a") == 12 and _flood(engine, "b") == 0


@pytest.mark.parametrize("num_floods", [2, 3, 5])
def test_floods_at_once_leave_places_for_one_more(full_engine, num_floods):
    engine = full_engine(max_queued_requests=60, share_queue=True, policy="fair")
    names = [f"t{i}" for i in range(num_floods)]
    for _ in range(60):
        for name in names:
            _flood(engine, name, most=1)
    counts = _waiting(engine, *names)
    share = 60 / (num_floods + 1)
    assert all(abs(count - share) <= 1 for count in counts)
    assert 60 - sum(counts) >= share - 1 and _flood(engine, "late") > 0


def test_tokens_are_shared_likewise_and_the_first_request_always_fits(full_engine):
    engine = full_engine(max_queued_tokens=100, share_queue=True)
    assert _flood(engine, "a", prompt_len=20) == 2  # no third: 60 beside 40 left
    assert _flood(engine, "b", prompt_len=20) == 1
    engine.run()
    assert _flood(engine, "a", prompt_len=100, most=1) == 1
    engine.run()
    engine.check_end()


def test_siblings_count_one_by_one(full_engine):
    engine = full_engine(max_queued_requests=12, share_queue=True, policy="fair")
    assert _flood(engine, "a", n=4) == 1  # no second one: 8 beside 4 left
    assert _flood(engine, "b", n=8) == 1
    engine.run()
    engine.check_end()


def test_one_place_is_still_a_queue(full_engine):
    engine = full_engine(max_queued_requests=1, share_queue=True)
    assert _flood(engine, "a") == 1 and _flood(engine, "b") == 0
