"""The scheduler, driven over a fake device whose tokens depend on every page."""

import dataclasses

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.compaction import plan_swaps, swaps_to_sources
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.request import RequestStatus, make_request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import StepResult, pick_decode_bucket
from headrace.engine.scheduler import Scheduler

MODEL = ModelConfig(
    num_layers=1,
    model_dim=8,
    ffw_dim=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=11,
    context_len=128,
    stop_ids=(3,),
)


def config_of(**changes):
    values = {
        "max_context_len": 128,
        "page_size": 16,
        "num_pages": 33,
        "num_slots": 4,
        "decode_batch_sizes": (1, 2, 4),
        "prefill_shapes": ((1, 32), (2, 16)),
        "prefill_calls_per_decode": 1,
    }
    return EngineConfig(**{**values, **changes})


def request_of(name, prompt_len, max_tokens=4, config=None, **params):
    params = {"ignore_eos": True, "max_tokens": max_tokens, **params}
    return make_request(
        str(name),
        [(7 * i + len(str(name)) + prompt_len) % 11 for i in range(prompt_len)],
        SamplingParams(**params),
        model_config=MODEL,
        engine_config=config or config_of(),
        arrival_s=0.0,
    )


class Engine:
    """The loop: schedule, run on the fake device, update; checks as it goes.

    With `lag` it schedules step N + 1 before it updates with step N.
    """

    def __init__(self, config, fake_device, lag=False):
        self.config, self.lag = config, lag
        self.manager = KVCacheManager(config.num_pages, config.page_size)
        self.clock_s = 0.0
        self.scheduler = Scheduler(config, self.manager, lambda: self.clock_s)
        self.device = fake_device(config.num_slots, config.num_pages)
        self.requests = []  # in order of arrival
        self.chunks = {}
        self.pending = None
        self.num_paused, self.batch_rows, self.static_batch = 0, 0, set()

    def add(self, *requests):
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self):
        """One turn; returns the schedule, None where nothing was to do."""
        self.clock_s += 1.0
        could_decode = [
            r
            for r in self.requests
            if r.status is RequestStatus.DECODING and r.num_dispatched < r.max_tokens
        ]
        busy = {r.request_id for r in self.requests if self.is_running(r)}
        schedule = self.scheduler.schedule()
        result = None
        if schedule is not None:
            self.check(schedule, could_decode, busy)
            tokens, finish = self.device.step(schedule)
            result = StepResult(token_ids=tokens, finish_codes=finish)
        else:
            assert self.pending or not self.scheduler.has_work
        if self.lag:
            result_now, self.pending = self.pending, (schedule, result)
        else:
            result_now = (schedule, result)
        if result_now is not None and result_now[0] is not None:
            self.scheduler.update(*result_now)
        if schedule is None and self.pending == (None, None):
            self.pending = None
        return schedule

    def run(self, max_steps=2000):
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.pending:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    @staticmethod
    def is_running(request):
        return request.status in (RequestStatus.PREFILLING, RequestStatus.DECODING)

    def check(self, schedule, could_decode, busy):
        running = [r for r in self.requests if self.is_running(r)]
        slots = [r.slot for r in running]
        assert len(slots) == len(set(slots)), "two requests in one slot"
        pages = [page for r in running for page in r.pages]
        assert len(pages) == len(set(pages)) and 0 not in pages
        assert self.manager.num_free + len(pages) == self.config.num_pages - 1
        live = [r.status for r in self.requests if not r.is_finished]
        waits = [status is RequestStatus.WAITING for status in live]
        assert waits == sorted(waits), "somebody overtook in the queue"
        self.check_prefill(schedule)
        if schedule.decode:
            assert set(schedule.decode) == set(could_decode), "all decode, or none"
            assert len(schedule.decode) == len(could_decode)
            assert schedule.decode_slots == tuple(r.slot for r in schedule.decode)
        if self.config.policy == "static":
            self.check_static(schedule, running, busy)
            return
        sizes = self.config.decode_batch_sizes
        assert pick_decode_bucket(sizes, schedule.num_rows) == pick_decode_bucket(
            sizes, len(running)
        ), "a smaller decode bucket would do"
        is_paused = bool(could_decode) and not schedule.decode
        assert not is_paused or schedule.prefill
        self.num_paused = self.num_paused + 1 if is_paused else 0
        assert self.num_paused < self.config.prefill_calls_per_decode

    def check_prefill(self, schedule):
        rows = schedule.prefill
        longest = max((c.length for c in rows), default=0)
        shapes = self.config.prefill_shapes
        assert any(r >= len(rows) and t >= longest for r, t in shapes)
        order = [self.requests.index(c.request) for c in rows]
        assert order == sorted(set(order))
        for chunk in rows:
            assert chunk.slot == chunk.request.slot
            done = self.chunks.setdefault(chunk.request.request_id, [])
            assert chunk.start == sum(done)
            done.append(chunk.length)
            assert chunk.is_last == (sum(done) == chunk.request.prompt_len)

    def check_static(self, schedule, running, busy):
        names = {r.request_id for r in running}
        if names - busy:
            assert not busy, "admitted into a batch that still runs"
            self.batch_rows = schedule.num_rows
        assert schedule.num_rows == self.batch_rows, "the static bucket shrank"
        assert schedule.slot_sources is None
        if schedule.decode:
            assert not schedule.prefill
            assert all(r.status is RequestStatus.DECODING for r in running)

    def check_end(self, alone):
        longest_chunk = max(tokens for _, tokens in self.config.prefill_shapes)
        assert self.manager.num_free == self.config.num_pages - 1
        assert self.scheduler.num_free_slots == self.config.num_slots
        for request in self.requests:
            expected = alone(request)
            got = request.output_token_ids
            if request.finish_reason == "abort":
                assert got == expected[: len(got)]
                continue
            assert got == expected
            is_stop = bool(got) and got[-1] in request.stop_ids
            assert request.finish_reason == ("stop" if is_stop else "length")
            full, rest = divmod(request.prompt_len - 1, longest_chunk)
            lengths = [longest_chunk] * full + [rest + 1]
            assert self.chunks[request.request_id] == lengths


@dataclasses.dataclass(frozen=True)
class Arrival:
    prompt_len: int
    max_tokens: int
    step: int
    has_stops: bool
    aborted_after: int | None


@st.composite
def configs(draw, policies=("fcfs", "static")):
    num_slots = draw(st.integers(1, 6))
    sizes = draw(st.sets(st.integers(1, num_slots))) | {num_slots}
    shape = st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 24]))
    shapes = draw(st.sets(shape, min_size=1, max_size=3))
    return config_of(
        num_slots=num_slots,
        decode_batch_sizes=tuple(sorted(sizes)),
        prefill_shapes=tuple(sorted(shapes)),
        num_pages=draw(st.integers(5, 16)),
        prefill_calls_per_decode=draw(st.integers(1, 4)),
        policy=draw(st.sampled_from(policies)),
    )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        prompt_len=st.integers(1, 50),
        max_tokens=st.integers(1, 14),
        step=st.integers(0, 25),
        has_stops=st.booleans(),
        aborted_after=st.none() | st.none() | st.integers(0, 12),
    ),
    max_size=12,
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(configs(), ARRIVALS, st.booleans())
def test_every_request_gets_the_tokens_it_gets_alone(
    fake_device, alone, config, arrivals, lag
):
    engine = Engine(config, fake_device, lag)
    plan = list(enumerate(sorted(arrivals, key=lambda a: a.step)))
    aborts = [(a.step + a.aborted_after, i) for i, a in plan if a.aborted_after]
    for step in range(40):
        for name, arrival in plan:
            if arrival.step == step:
                params = {"ignore_eos": not arrival.has_stops}
                lens = (arrival.prompt_len, arrival.max_tokens)
                engine.add(request_of(name, *lens, config, **params))
        for when, name in aborts:
            if when == step:
                engine.scheduler.abort(str(name))
        engine.step()
    engine.run()
    engine.check_end(alone)


def test_slots_are_given_lowest_first_in_order_of_arrival(fake_device):
    engine = Engine(config_of(), fake_device)
    engine.add(*[request_of(name, 5) for name in "abcde"])
    engine.step()
    assert [r.slot for r in engine.requests] == [0, 1, 2, 3, None]


def test_large_request_at_the_head_is_not_overtaken(fake_device, alone):
    engine = Engine(config_of(num_pages=6), fake_device)
    small, large, tiny = request_of("s", 30), request_of("l", 60), request_of("t", 4)
    engine.add(small, large, tiny)
    engine.step()
    assert small.slot == 0 and large.slot is None and tiny.slot is None
    engine.run()
    assert large.first_token_s < tiny.finished_s
    engine.check_end(alone)


def test_prompt_is_filled_in_chunks_that_depend_on_it_alone(fake_device):
    lengths = {}
    for company in (0, 3):
        engine = Engine(config_of(), fake_device)
        engine.add(*[request_of(f"c{i}", 9) for i in range(company)])
        engine.add(request_of("long", 75))
        engine.run()
        lengths[company] = engine.chunks["long"]
    assert lengths == {0: [32, 32, 11], 3: [32, 32, 11]}


def test_short_prompts_share_a_call_while_a_bucket_holds_them(fake_device):
    engine = Engine(config_of(), fake_device)
    engine.add(*[request_of(i, n) for i, n in enumerate([16, 9, 3, 20])])
    rows = [[c.length for c in engine.step().prefill] for _ in range(3)]
    assert rows == [[16, 9], [3], [20]]


def test_prefill_ending_in_a_step_decodes_from_the_next(fake_device):
    engine = Engine(config_of(), fake_device)
    request = request_of("a", 5, 3)
    engine.add(request)
    first, second = engine.step(), engine.step()
    assert (len(first.prefill), first.decode) == (1, ())
    assert (second.prefill, second.decode) == ((), (request,))
    assert len(request.output_token_ids) == 2


def test_single_token_request_ends_with_its_prefill(fake_device, alone):
    engine = Engine(config_of(), fake_device)
    request = request_of("a", 5, 1)
    engine.add(request)
    assert engine.step().decode == ()
    assert request.is_finished and request.finish_reason == "length"
    assert engine.step() is None
    engine.check_end(alone)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_decode_joins_every_nth_prefill_call(fake_device, limit):
    config = config_of(prefill_calls_per_decode=limit, prefill_shapes=((1, 8),))
    engine = Engine(config, fake_device)
    engine.add(request_of("a", 5, 20), request_of("b", 80, 2))
    engine.step()
    joins = [bool(engine.step().decode) for _ in range(6)]
    assert joins == [(i + 1) % limit == 0 for i in range(6)]


def test_last_request_moves_down_when_a_smaller_bucket_suffices(fake_device, alone):
    engine = Engine(config_of(prefill_shapes=((4, 16),)), fake_device)
    short = [request_of(i, 5, 2) for i in range(3)]
    long = request_of("long", 5, 9)
    engine.add(*short, long)
    engine.step()
    engine.step()
    assert all(r.is_finished for r in short)
    assert long.slot == 3
    schedule = engine.step()
    assert schedule.slot_sources == (3, 1, 2, 0)
    assert (long.slot, schedule.num_rows) == (0, 1)
    assert engine.step().slot_sources is None
    engine.run()
    engine.check_end(alone)


def test_aborted_request_frees_its_pages_now_and_its_row_next_step(fake_device, alone):
    engine = Engine(config_of(), fake_device)
    gone, stays = request_of("gone", 5, 9), request_of("stays", 5, 9)
    engine.add(gone, stays)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.abort("gone") is gone
    assert (gone.finish_reason, gone.is_finished, gone.pages) == ("abort", True, [])
    assert len(gone.output_token_ids) == 3
    assert engine.step().released == (1,)  # slot 0, after `stays` moved down to it
    assert engine.step().released == ()
    engine.run()
    engine.check_end(alone)


def test_slot_of_an_aborted_request_is_reused_in_the_step_that_releases_it(
    fake_device, alone
):
    engine = Engine(config_of(num_slots=1, decode_batch_sizes=(1,)), fake_device)
    engine.add(request_of("gone", 5, 9), request_of("next", 7, 9))
    engine.step()
    engine.scheduler.abort("gone")
    schedule = engine.step()
    assert schedule.released == (0,)
    assert [(c.request.request_id, c.slot) for c in schedule.prefill] == [("next", 0)]
    engine.run()
    engine.check_end(alone)


def test_abort_while_waiting_releases_nothing(fake_device):
    engine = Engine(config_of(), fake_device)
    engine.add(request_of("a", 5))
    assert engine.scheduler.abort("a").finish_reason == "abort"
    assert not engine.scheduler.has_work and engine.step() is None


def test_abort_of_an_unknown_or_ended_request_does_nothing(fake_device):
    engine = Engine(config_of(), fake_device)
    engine.add(request_of("a", 5, 1))
    engine.run()
    assert engine.scheduler.abort("a") is None
    assert engine.scheduler.abort("nobody") is None
    assert engine.requests[0].finish_reason == "length"


def test_static_batch_refills_only_when_all_are_done(fake_device, alone):
    config = config_of(policy="static", num_slots=2, decode_batch_sizes=(1, 2))
    engine = Engine(config, fake_device)
    short, long, late = request_of(0, 5, 1), request_of(1, 5, 6), request_of(2, 5, 6)
    engine.add(short, long, late)
    while not long.is_finished:
        schedule = engine.step()
        assert late.status is RequestStatus.WAITING
        assert schedule.num_rows == 2
    assert short.is_finished
    assert engine.step().prefill[0].request is late
    engine.run()
    engine.check_end(alone)


def test_id_of_a_live_request_cannot_be_added_again(fake_device):
    engine = Engine(config_of(), fake_device)
    engine.add(request_of("a", 5))
    with pytest.raises(ValueError, match="unique among live requests, got 'a'"):
        engine.scheduler.add(request_of("a", 6))
    engine.run()
    engine.scheduler.add(request_of("a", 6))
    engine.scheduler.abort("a")
    with pytest.raises(ValueError, match="added once"):
        engine.scheduler.add(engine.requests[0])


def test_times_and_stop_reason_are_those_of_the_token(fake_device, alone):
    engine = Engine(config_of(), fake_device)
    stop_id = alone(request_of("a", 40, 12))[4]
    users = request_of("a", 40, 12, stop_token_ids=[stop_id])
    engine.add(users)
    engine.run()
    assert users.output_token_ids[-1] == users.stop_reason == stop_id
    assert users.finish_reason == "stop"
    assert users.first_token_s == 2.0  # the prompt takes two steps
    assert users.finished_s == 2.0 + len(users.output_token_ids) - 1


def test_end_by_the_models_own_stop_id_has_no_stop_reason(fake_device, alone):
    names = (f"n{'x' * i}" for i in range(100))
    requests = (request_of(name, 9, 40, ignore_eos=False) for name in names)
    request = next(r for r in requests if alone(r)[-1] == 3)
    engine = Engine(config_of(), fake_device)
    engine.add(request)
    engine.run()
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    engine.check_end(alone)


def test_logprobs_list_the_sampled_token_first_and_as_many_as_asked():
    config = config_of()
    scheduler = Scheduler(config, KVCacheManager(config.num_pages, 16))
    asks = [request_of(i, 3, 2, logprobs=n) for i, n in enumerate([0, 2])]
    for request in asks:
        scheduler.add(request)
    schedule = scheduler.schedule()
    result = StepResult(
        token_ids=np.array([4, 6, 0, 0], np.int32),
        finish_codes=np.zeros(4, np.int32),
        logprob=np.array([-2.0, -0.5, 0, 0], np.float32),
        rank=np.array([3, 1, 0, 0], np.int32),
        top_ids=np.array([[1, 2, 4], [6, 1, 2], [0] * 3, [0] * 3], np.int32),
        top_logprobs=np.array(
            [[-0.25, -1, -2], [-0.5, -1.5, -2], [0] * 3, [0] * 3], np.float32
        ),
    )
    assert scheduler.update(schedule, result) == asks
    assert asks[0].output_logprobs == [{4: (-2.0, 3)}]
    assert asks[1].output_logprobs == [{6: (-0.5, 1), 1: (-1.5, 2)}]
    assert list(asks[1].output_logprobs[0]) == [6, 1]
    assert asks[1].cumulative_logprob == -0.5


@pytest.mark.parametrize(
    ("taken", "sizes", "swaps"),
    [
        ([1, 0, 1, 0, 0, 1, 0, 0], (4, 8), [(1, 5)]),
        ([0, 0, 0, 1], (1, 2, 4), [(0, 3)]),
        ([0, 0, 1, 1], (2, 4), [(0, 2), (1, 3)]),
        ([1, 0, 1, 0], (4,), []),
        ([0, 0, 0, 0], (1, 4), []),
        ([1, 1, 1, 0], (1, 4), []),
    ],
)
def test_swaps_fill_the_lowest_holes(taken, sizes, swaps):
    assert plan_swaps([bool(t) for t in taken], sizes) == swaps


def test_swaps_as_sources_are_their_own_inverse():
    sources = swaps_to_sources([(1, 5), (2, 4)], 6)
    assert sources == (0, 5, 4, 3, 2, 1)
    assert [sources[s] for s in sources] == list(range(6))
