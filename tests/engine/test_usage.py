"""The ledger leaves nothing out: its sums are the engine's own, whoever asked."""

import collections
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.engine import usage
from headrace.engine.request import Request
from headrace.engine.schedule import PrefillChunk, Schedule
from headrace.engine.usage import UsageLedger

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def fresh_llm(tiny_llm, tiny_checkpoint):
    """Nothing was asked of it yet."""
    llm = LLM.from_checkpoint(tiny_checkpoint, config=tiny_llm.engine_config)
    yield llm
    llm.close()


NAMES = st.one_of(
    st.none(), st.text(max_size=80), st.sampled_from(["a", "b", usage.OTHER])
)


def _request(tenant, prompt_len=3):
    return Request(
        request_id="1",
        prompt_token_ids=(1,) * prompt_len,
        params=PARAMS,
        max_tokens=4,
        seed=0,
        tenant=tenant,
    )


def _schedule(rows, chunks=()):
    return Schedule(
        num_rows=len(rows),
        decode=tuple(_request(name) for name in rows),
        decode_slots=np.arange(len(rows)),
        prefill=tuple(
            PrefillChunk(
                request=_request(name), slot=9, start=0, length=length, is_last=False
            )
            for name, length in chunks
        ),
    )


def test_seconds_follow_the_tokens_computed():
    ledger = UsageLedger()
    ledger.on_step(8.0, _schedule("aab", [("b", 4), ("c", 1)]))
    seconds = {k: v["device_seconds"] for k, v in ledger.snapshot().items()}
    assert seconds == {"a": 2.0, "b": 5.0, "c": 1.0}


def test_other_rows_of_the_same_number_are_other_tenants():
    ledger = UsageLedger()
    for rows in ("ab", "bb", "ba"):
        ledger.on_step(2.0, _schedule(rows))
    seconds = {k: v["device_seconds"] for k, v in ledger.snapshot().items()}
    assert seconds == {"a": 2.0, "b": 4.0}


def test_a_step_without_tokens_is_paid_with_the_next():
    ledger = UsageLedger()
    ledger.on_step(3.0, _schedule(""))
    assert ledger.snapshot() == {}
    ledger.on_step(1.0, _schedule("a"))
    ledger.on_step(1.0, _schedule("a"))
    assert ledger.snapshot()["a"]["device_seconds"] == 5.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e3),
            st.lists(NAMES, max_size=5),
            st.lists(st.tuples(NAMES, st.integers(1, 99)), max_size=3),
        ),
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_all_seconds_are_somebodys_and_names_are_few(steps, most):
    ledger = UsageLedger(most)
    for seconds, rows, chunks in steps:
        schedule = _schedule(rows, chunks)
        ledger.on_step(seconds / 2, schedule)
        ledger.on_step(seconds / 2, schedule)
    ledger.on_step(1.0, _schedule("z"))  # whatever was carried is booked with it
    shown = ledger.snapshot()
    total = sum(one["device_seconds"] for one in shown.values())
    assert total == pytest.approx(1 + sum(step[0] for step in steps))
    assert len(shown) <= most + 1
    for name in shown:
        assert 0 < len(name) <= usage.MAX_NAME_LEN and name.isprintable()


def test_an_engine_books_every_token_by_tenant(fresh_llm):
    llm = fresh_llm
    expected = collections.defaultdict(lambda: collections.Counter())
    for tenant, length in (("a", 40), ("b", 7), (None, 20), ("a", 40)):
        ids = list(range(1, length + 1))
        llm.generate({"prompt_token_ids": ids}, PARAMS, tenant=tenant)
        expected[tenant or usage.ANONYMOUS].update(
            requests=1, prompt_tokens=length, generation_tokens=4
        )
    stats = llm.stats()
    for tenant, counts in expected.items():
        found = stats["tenants"][tenant]
        assert {name: found[name] for name in counts} == counts
        assert found["device_seconds"] > 0
    tenants, counters = stats["tenants"].values(), stats["counters"]
    assert stats["tenants"].keys() == expected.keys()
    assert stats["tenants"]["a"]["cached_prompt_tokens"] > 0
    assert stats["tenants"]["b"]["cached_prompt_tokens"] == 0
    for name, counter in (
        ("prompt_tokens", "prompt_tokens"),
        ("cached_prompt_tokens", "prompt_tokens_cached"),
        ("generation_tokens", "generation_tokens"),
    ):
        assert sum(one[name] for one in tenants) == counters[counter], name


def test_steps_that_overlap_are_not_paid_twice(fresh_llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    begin_s = time.perf_counter()
    fresh_llm.generate(
        [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}], params
    )
    wall_s = time.perf_counter() - begin_s
    (found,) = fresh_llm.stats()["tenants"].values()
    assert 0 < found["device_seconds"] <= wall_s


def test_live_requests_count_and_a_cancelled_one_stays_booked(fresh_llm):
    llm = fresh_llm
    stream = llm.stream(
        {"prompt_token_ids": [1, 2, 3]},
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        tenant="a",
    )
    for _ in range(3):
        next(stream)
    live = llm.stats()["tenants"]["a"]
    assert live["requests"] == 0 and live["generation_tokens"] >= 3
    stream.close()
    llm.generate({"prompt_token_ids": [5]}, PARAMS, tenant="b")
    ended = llm.stats()["tenants"]["a"]
    assert ended["requests"] == 1 and ended["prompt_tokens"] == 3
    assert ended["generation_tokens"] >= live["generation_tokens"]
    assert llm._loop.meter._live == {}


def test_a_request_cancelled_before_its_step_is_read_leaves_nothing(fresh_llm):
    llm = fresh_llm
    loop = llm._loop
    state = loop.submit([1, 2, 3], PARAMS, tenant="a")
    loop.turn()  # dispatched, not read
    loop.cancel(state)
    while loop.has_work:
        loop.turn()
    found = llm.stats()["tenants"]["a"]
    assert (found["requests"], found["prompt_tokens"]) == (1, 3)
    assert loop.meter._live == {}
