"""Who comes next: priority with ageing, fair shares, limits, and waiting for pages."""

import hypothesis
import pytest
from hypothesis import strategies as st

from headrace.engine.admission import QueueFullError
from headrace.engine.request import RequestStatus

ONE_SLOT = {"num_slots": 1, "decode_batch_sizes": (1,)}


def _add(engine, name, prompt_len=5, max_tokens=4, **fields):
    fields.setdefault("arrival_s", engine.clock_s)
    request = engine.request(name, prompt_len, max_tokens, fields=fields)
    engine.add(request)
    return request


def _order(requests):
    """Names in the order of their first tokens."""
    return [r.request_id for r in sorted(requests, key=lambda r: r.first_token_s)]


def test_lower_priority_numbers_run_first(engine_of):
    engine = engine_of(policy="priority", **ONE_SLOT)
    priorities = {"a": 1, "b": 0, "c": -1}
    requests = [_add(engine, name, priority=p) for name, p in priorities.items()]
    engine.run()
    assert _order(requests) == ["c", "b", "a"]


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(st.integers(1, 5), st.integers(2, 9))
def test_nobody_waits_longer_than_its_priority_is_worth(engine_of, priority, ageing):
    """However many urgent requests come, those later than the bound come after."""
    engine = engine_of(policy="priority", ageing_s=float(ageing), **ONE_SLOT)
    patient = _add(engine, "patient", priority=priority)
    bound_s, urgent = patient.arrival_s + priority * ageing, []
    while patient.first_token_s is None:
        urgent.append(_add(engine, f"u{len(urgent)}", max_tokens=1))
        engine.step()
        assert len(urgent) <= 2 * (priority * ageing + 3), "it starves"
    late = [r for r in urgent if r.arrival_s > bound_s and r.first_token_s is not None]
    assert late == []
    engine.run()
    engine.check_end()


@pytest.mark.parametrize("flood", [8, 40])
def test_flood_of_one_tenant_delays_anothers_request_by_few_steps(engine_of, flood):
    engine = engine_of(policy="fair", num_host_pages=64, num_pages=65)
    for i in range(flood):
        _add(engine, f"f{i}", max_tokens=60, tenant="flood")
    for _ in range(10):
        engine.step()
    lone = _add(engine, "lone", tenant="lone")
    waited = 0
    while lone.first_token_s is None:
        engine.step()
        waited += 1
    # It takes a slot at once, however long the flood's requests still run.
    assert waited <= 3
    assert engine.scheduler.num_preemptions == 1
    engine.run()
    engine.check_end()


def test_a_tenant_with_a_slot_gets_as_many_as_a_flood_if_it_asks(engine_of):
    engine = engine_of(policy="fair", num_host_pages=64, num_pages=65)
    for i in range(20):
        _add(engine, f"f{i}", max_tokens=60, tenant="flood")
    for _ in range(10):
        engine.step()
    lone = [_add(engine, f"l{i}", max_tokens=40, tenant="lone") for i in range(3)]
    for _ in range(5):
        engine.step()
    # Two of the four slots at once; the third request is no better than the flood's.
    has_begun = [request.first_token_s is not None for request in lone]
    assert has_begun == [True, True, False]
    assert engine.scheduler.num_preemptions == 2
    engine.run()
    engine.check_end()


def test_several_tenants_get_their_slots_from_a_flood_in_one_step(engine_of):
    engine = engine_of(policy="fair", num_host_pages=64, num_pages=65)
    for i in range(20):
        _add(engine, f"f{i}", max_tokens=60, tenant="flood")
    for _ in range(10):
        engine.step()
    lone = [_add(engine, f"l{i}", tenant=f"lone{i}") for i in range(3)]
    engine.step()
    assert all(engine.is_running(request) for request in lone)
    engine.run()
    engine.check_end()


def test_prompts_of_a_flood_delay_anothers_by_a_chunk(engine_of):
    shapes = {"prefill_shapes": ((1, 32),), "num_slots": 8}
    engine = engine_of(policy="fair", num_pages=65, decode_batch_sizes=(8,), **shapes)
    flood = [_add(engine, f"f{i}", 60, tenant="flood") for i in range(7)]
    engine.step()
    lone = [_add(engine, "lone", 60, tenant="lone")]
    while lone[0].first_token_s is None:
        engine.step()
    # Two chunks each way in turns, and the rest of the flood's prompts after them.
    assert sum(request.first_token_s is not None for request in flood) == 1
    engine.run()
    engine.check_end()


def test_no_prompt_waits_for_ever_behind_tenants_that_come_and_go(engine_of):
    shapes = {"prefill_shapes": ((1, 32),), "num_slots": 8}
    engine = engine_of(policy="fair", num_pages=65, decode_batch_sizes=(8,), **shapes)
    patient = [_add(engine, f"p{i}", 60, tenant="patient") for i in range(2)]
    count = 0
    while patient[1].first_token_s is None:
        for tenant in "ab":
            _add(engine, f"{tenant}{count}", 5, max_tokens=1, tenant=tenant)
        engine.step()
        count += 1
        assert count < 20, "it starves"
    engine.run()
    engine.check_end()


def test_fair_shares_tokens_between_tenants_that_both_wait(engine_of):
    engine = engine_of(policy="fair", **ONE_SLOT)
    names = [("a", 8), ("a", 8), ("a", 8), ("b", 8), ("b", 8)]
    requests = [
        _add(engine, f"{tenant}{i}", max_tokens=count, tenant=tenant)
        for i, (tenant, count) in enumerate(names)
    ]
    engine.run()
    assert [name[0] for name in _order(requests)] == ["a", "b", "a", "b", "a"]


def test_absent_tenant_brings_no_credit_back(engine_of):
    engine = engine_of(policy="fair", **ONE_SLOT)
    queue = engine.scheduler._life.admission.queue
    _add(engine, "a0", max_tokens=30, tenant="a")
    engine.run()
    _add(engine, "a1", max_tokens=30, tenant="a")
    engine.step()
    _add(engine, "b0", tenant="b")
    assert queue.served("b") == pytest.approx(queue.served("a"), abs=0.6)


def test_full_queue_refuses_and_takes_again_when_there_is_room(engine_of):
    engine = engine_of(max_queued_requests=2, max_queued_tokens=50, **ONE_SLOT)
    _add(engine, "a", 20)
    with pytest.raises(QueueFullError, match="max_queued_tokens is 50.* it 60"):
        _add(engine, "long", 40)
    _add(engine, "b", 20)
    with pytest.raises(QueueFullError, match="max_queued_requests is 2"):
        _add(engine, "c", 1)
    engine.step()  # "a" has a slot now
    _add(engine, "c", 1)
    engine.run()
    engine.check_end()


def test_deadline_ends_with_what_it_has_and_queue_time_limit_before_it_begins(
    engine_of,
):
    engine = engine_of(**ONE_SLOT)
    first = _add(engine, "first", max_tokens=50, deadline_s=6.0)
    second = _add(engine, "second", queue_deadline_s=3.0)
    third = _add(engine, "third", queue_deadline_s=60.0)
    engine.run()
    assert first.finish_reason == "deadline" and 0 < len(first.output_token_ids) < 50
    assert (second.finish_reason, second.output_token_ids) == ("rejected", [])
    assert third.finish_reason == "length"
    engine.check_end()


def test_idle_engine_waits_for_more_prompts_but_a_busy_one_does_not(engine_of):
    engine = engine_of(max_queue_delay_s=3.0, prefill_shapes=((4, 16),))
    first = _add(engine, "a", max_tokens=9)
    assert engine.step() is None and engine.step() is None
    _add(engine, "b", max_tokens=9)
    schedule = engine.step()
    assert len(schedule.prefill) == 2 and first.status is RequestStatus.DECODING
    _add(engine, "c")
    assert len(engine.step().prefill) == 1
    engine.run()
    engine.check_end()


def test_request_waits_for_a_page_that_another_is_filling(engine_of):
    """The second computes only its own part, and others overtake it meanwhile."""
    engine = engine_of(prefix_cache=True, prefill_shapes=((1, 32),))
    head = tuple(i % 11 for i in range(80))
    first = _add(engine, "first", prompt=(*head, 1))
    second = _add(engine, "second", prompt=(*head, 2, 3))
    other = _add(engine, "other", 5)
    engine.step()
    assert second.status is RequestStatus.WAITING
    assert other.status is not RequestStatus.WAITING
    engine.run()
    assert (first.num_cached, second.num_cached) == (0, 80)
    assert engine.chunks["second"] == [2]
    engine.check_end()


def test_token_budget_limits_the_prompts_of_a_step(engine_of):
    shapes = ((1, 16), (4, 16))
    engine = engine_of(max_tokens_per_step=20, prefill_shapes=shapes)
    for name in "abcd":
        _add(engine, name, 9)
    assert [len(engine.step().prefill) for _ in range(3)] == [2, 2, 0]
