"""Sending: times kept, bounds kept, and every failure counted. The clock is ours."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scripts.serving_load import Load, respread, watch
from headrace.scripts.serving_metrics import OK
from headrace.scripts.serving_targets import Piece, RequestFailed
from headrace.scripts.serving_workloads import Item


class FakeTarget:
    """Waits `steps` turns of the event loop, then gives the pieces of `answer`."""

    def __init__(self, answer, steps=0):
        self._answer, self._steps = answer, steps
        self.sent, self.running, self.most = [], 0, 0

    async def stream(self, item):
        self.sent.append(item)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self._steps):
                await asyncio.sleep(0)
            for piece in self._answer(item):
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.running -= 1


class FakeClock:
    """Time passes in sleeps alone."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    async def sleep(self, seconds):
        await asyncio.sleep(0)  # others begin before time goes on
        self.now_s += seconds


def whole(item):
    return [Piece(tokens=1, prompt_tokens=3)] * item.max_tokens


def run(target, count=1, arrivals_s=None, max_concurrency=None, **options):
    """(records, messages) of requests for 1, 2, ... tokens."""
    clock = FakeClock()
    load = Load(target, clock=clock, sleep=clock.sleep, **options)
    items = [Item(prompt=(1, 2), max_tokens=1 + i) for i in range(count)]
    arrivals_s = arrivals_s or [0.0] * count
    sending = load.run(items, arrivals_s, max_concurrency)
    # A bound for a run that hangs; time as the requests see it is the clock's.
    return asyncio.run(asyncio.wait_for(sending, 60)), load.messages


def test_requests_are_sent_in_order_at_their_times():
    target = FakeTarget(whole)
    records, _ = run(target, 3, [0.0, 0.5, 2.0])
    assert [item.max_tokens for item in target.sent] == [1, 2, 3]
    assert [record.sent_s for record in records] == [100.0, 100.5, 102.0]
    assert [record.late_s for record in records] == [0, 0, 0]
    assert [record.output_tokens for record in records] == [1, 2, 3]
    assert {record.status for record in records} == {OK}
    assert {record.prompt_tokens for record in records} == {3}


@pytest.mark.parametrize("bound", [1, 3, None])
def test_as_many_requests_run_as_the_bound_allows(bound):
    target = FakeTarget(whole, steps=5)
    records, _ = run(target, 8, max_concurrency=bound)
    assert target.most == (bound or 8)
    assert len(records) == 8 and all(record.is_ok for record in records)


def test_a_request_that_waits_for_room_tells_that_it_was_late():
    clock = FakeClock()

    class Slow(FakeTarget):
        async def stream(self, item):
            await clock.sleep(3.0)
            yield Piece(tokens=1)

    load = Load(Slow(whole), clock=clock, sleep=clock.sleep)
    items = [Item(prompt=(1,), max_tokens=1)] * 2
    first, second = asyncio.run(load.run(items, [0.0, 1.0], 1))
    # The second is due at 101; the first takes until 104.
    assert first.late_s == 0.0 and first.ended_s == second.sent_s == 104.0
    assert second.late_s == 3.0 and second.prompt_tokens == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestFailed("HTTP 429", "too many\nof them"), "HTTP 429"),
        (TimeoutError(), "timeout"),
        (ConnectionResetError("gone"), "ConnectionResetError"),
        (KeyError("x"), "KeyError"),
    ],
)
def test_failures_are_counted_by_reason_and_the_others_go_on(error, status):
    def answer(item):
        return whole(item) if item.max_tokens != 2 else [Piece(tokens=1), error]

    records, messages = run(FakeTarget(answer), 3)
    assert [record.status for record in records] == [OK, status, OK]
    assert records[1].output_tokens == 0 or records[1].events  # what came is kept
    assert set(messages) == {status}
    assert status != "HTTP 429" or messages[status] == "too many of them"


def test_room_is_given_back_after_a_failure():
    target = FakeTarget(lambda item: [RuntimeError("no")])
    records, _ = run(target, 4, max_concurrency=1)
    assert [record.status for record in records] == ["RuntimeError"] * 4


def test_a_request_without_end_is_given_up_and_closed():
    class Stuck(FakeTarget):
        async def stream(self, item):
            self.running += 1
            try:
                await asyncio.Event().wait()
                yield
            finally:
                self.running -= 1

    target = Stuck(whole)
    records, messages = run(target, timeout_s=0.01)
    assert [record.status for record in records] == ["timeout"]
    assert messages == {"timeout": "no end within 0.01 s"} and target.running == 0


@pytest.mark.parametrize(
    ("tokens", "ignore_eos", "status"),
    [
        (4, True, OK),
        (3, True, "wrong length"),
        (5, True, "wrong length"),
        (3, False, OK),
        (5, False, "wrong length"),
        (0, False, "wrong length"),
    ],
)
def test_an_output_has_the_length_that_was_asked(tokens, ignore_eos, status):
    target = FakeTarget(lambda item: [Piece(tokens=1)] * tokens)
    load = Load(target, ignore_eos=ignore_eos)
    items = [Item(prompt=(1,), max_tokens=4)]
    (record,) = asyncio.run(load.run(items, [0.0]))
    assert record.status == status


def test_pieces_without_tokens_are_no_events():
    pieces = [Piece(tokens=0), Piece(tokens=1), Piece(tokens=0, prompt_tokens=9)]
    (record,), _ = run(FakeTarget(lambda item: pieces))
    assert len(record.events) == 1 and record.prompt_tokens == 9


def test_guessed_tokens_are_spread_once_the_sum_is_known():
    guessed = [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)]
    assert respread(guessed, 9) == [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 3)]
    assert respread(guessed, None) == guessed
    assert respread(guessed, 2) == [(1.0, 1), (2.0, 1)]
    assert respread(guessed[:1], 7) == [(1.0, 7)]
    assert respread(guessed, 0) == respread([], 5) == []


@settings(deadline=None)
@given(count=st.integers(1, 30), total=st.integers(0, 200))
def test_spreading_keeps_the_sum_and_gives_every_piece_a_token(count, total):
    found = respread([(float(i), 1) for i in range(count)], total)
    assert sum(tokens for _, tokens in found) == total
    assert all(tokens >= 1 for _, tokens in found)
    later = [tokens for _, tokens in found[1:]]
    assert not later or max(later) - min(later) <= 1


def test_watching_ends_where_there_is_nothing_to_see():
    states = [{"a": 1.0}, {"a": 2.0}, None]

    class Target:
        async def counters(self):
            return states.pop(0)

    found = []
    asyncio.run(asyncio.wait_for(watch(Target(), 0.0, found), 5))
    assert found == [{"a": 1.0}, {"a": 2.0}]
