"""One behaviour of the scheduler each, over a fake device (see conftest)."""

import numpy as np
import pytest

from headrace.engine.request import RequestStatus
from headrace.engine.schedule import Scores, StepResult


def test_slots_are_given_lowest_first_in_order_of_arrival(engine_of):
    engine = engine_of()
    engine.add(*[engine.request(name, 5) for name in "abcde"])
    engine.step()
    assert [r.slot for r in engine.requests] == [0, 1, 2, 3, None]


def test_large_request_at_the_head_is_not_overtaken(engine_of):
    engine = engine_of(num_pages=6)
    small, large, tiny = (
        engine.request("s", 30),
        engine.request("l", 60),
        engine.request("t", 4),
    )
    engine.add(small, large, tiny)
    engine.step()
    assert small.slot == 0 and large.slot is None and tiny.slot is None
    engine.run()
    assert large.first_token_s < tiny.finished_s
    engine.check_end()


def test_prompt_is_filled_in_chunks_that_depend_on_it_alone(engine_of):
    lengths = {}
    for company in (0, 3):
        engine = engine_of()
        engine.add(*[engine.request(f"c{i}", 9) for i in range(company)])
        engine.add(engine.request("long", 75))
        engine.run()
        lengths[company] = engine.chunks["long"]
    assert lengths == {0: [32, 32, 11], 3: [32, 32, 11]}


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([16, 9, 3, 20], [[16, 9], [3], [20]]),
        ([16, 20, 3], [[16], [20], [3]]),  # 3 would fit beside 16, but not overtake 20
    ],
)
def test_prompts_share_a_call_while_a_bucket_holds_them(engine_of, lengths, calls):
    engine = engine_of()
    engine.add(*[engine.request(i, length) for i, length in enumerate(lengths)])
    assert [[c.length for c in engine.step().prefill] for _ in range(3)] == calls


def test_prefill_ending_in_a_step_decodes_from_the_next(engine_of):
    engine = engine_of()
    request = engine.request("a", 5, 3)
    engine.add(request)
    first, second = engine.step(), engine.step()
    assert (len(first.prefill), first.decode) == (1, ())
    assert (second.prefill, second.decode) == ((), (request,))
    assert len(request.output_token_ids) == 2


def test_single_token_request_ends_with_its_prefill(engine_of):
    engine = engine_of()
    request = engine.request("a", 5, 1)
    engine.add(request)
    assert engine.step().decode == ()
    assert request.is_finished and request.finish_reason == "length"
    assert engine.step() is None
    engine.check_end()


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_decode_joins_every_nth_prefill_call(engine_of, limit):
    engine = engine_of(prefill_calls_per_decode=limit, prefill_shapes=((1, 8),))
    engine.add(engine.request("a", 5, 20), engine.request("b", 80, 2))
    engine.step()
    joins = [bool(engine.step().decode) for _ in range(6)]
    assert joins == [(i + 1) % limit == 0 for i in range(6)]


def test_last_request_moves_down_when_a_smaller_bucket_suffices(engine_of):
    engine = engine_of(prefill_shapes=((4, 16),))
    short = [engine.request(i, 5, 2) for i in range(3)]
    long = engine.request("long", 5, 9)
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
    engine.check_end()


def test_aborted_request_frees_its_pages_now_and_its_row_next_step(engine_of):
    engine = engine_of()
    gone, stays = engine.request("gone", 5, 9), engine.request("stays", 5, 9)
    engine.add(gone, stays)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.abort("gone") is gone
    assert (gone.finish_reason, gone.is_finished, gone.pages) == ("cancelled", True, [])
    assert len(gone.output_token_ids) == 3
    assert engine.step().released == (1,)  # slot 0, after `stays` moved down to it
    assert engine.step().released == ()
    engine.run()
    engine.check_end()


def test_slot_of_an_aborted_request_is_reused_in_the_step_that_releases_it(engine_of):
    engine = engine_of(num_slots=1, decode_batch_sizes=(1,))
    engine.add(engine.request("gone", 5, 9), engine.request("next", 7, 9))
    engine.step()
    engine.scheduler.abort("gone")
    schedule = engine.step()
    assert schedule.released == (0,)
    assert [(c.request.request_id, c.slot) for c in schedule.prefill] == [("next", 0)]
    engine.run()
    engine.check_end()


def test_abort_while_waiting_releases_nothing(engine_of):
    engine = engine_of()
    engine.add(engine.request("a", 5))
    assert engine.scheduler.abort("a").finish_reason == "cancelled"
    assert not engine.scheduler.has_work and engine.step() is None


def test_abort_of_an_unknown_or_ended_request_does_nothing(engine_of):
    engine = engine_of()
    engine.add(engine.request("a", 5, 1))
    engine.run()
    assert engine.scheduler.abort("a") is None
    assert engine.scheduler.abort("nobody") is None
    assert engine.requests[0].finish_reason == "length"


def test_static_batch_refills_only_when_all_are_done(engine_of):
    engine = engine_of(policy="static", num_slots=2, decode_batch_sizes=(1, 2))
    short, long, late = (
        engine.request(0, 5, 1),
        engine.request(1, 5, 6),
        engine.request(2, 5, 6),
    )
    engine.add(short, long, late)
    while not long.is_finished:
        schedule = engine.step()
        assert late.status is RequestStatus.WAITING
        assert schedule.num_rows == 2
    assert short.is_finished
    assert engine.step().prefill[0].request is late
    engine.run()
    engine.check_end()


def test_id_of_a_live_request_cannot_be_added_again(engine_of):
    engine = engine_of()
    engine.add(engine.request("a", 5))
    with pytest.raises(ValueError, match="unique among live requests, got 'a'"):
        engine.scheduler.add(engine.request("a", 6))
    engine.run()
    engine.scheduler.add(engine.request("a", 6))
    engine.scheduler.abort("a")
    with pytest.raises(ValueError, match="added once"):
        engine.scheduler.add(engine.requests[0])


def test_times_and_stop_reason_are_those_of_the_token(engine_of, alone):
    engine = engine_of()
    stop_id = alone(engine.request("a", 40, 12))[4]
    users = engine.request("a", 40, 12, stop_token_ids=[stop_id])
    engine.add(users)
    engine.run()
    assert users.output_token_ids[-1] == users.stop_reason == stop_id
    assert users.finish_reason == "stop"
    assert users.first_token_s == 2.0  # the prompt takes two steps
    assert users.finished_s == 2.0 + len(users.output_token_ids) - 1


def test_end_by_the_models_own_stop_id_has_no_stop_reason(engine_of, alone):
    engine = engine_of()
    names = (f"n{'x' * i}" for i in range(100))
    requests = (engine.request(name, 9, 40, ignore_eos=False) for name in names)
    request = next(r for r in requests if alone(r)[-1] == 3)
    engine.add(request)
    engine.run()
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    engine.check_end()


def test_logprobs_list_the_sampled_token_first_and_as_many_as_asked(engine_of):
    engine = engine_of()
    asks = [engine.request(i, 3, 2, logprobs=n) for i, n in enumerate([0, 2])]
    engine.add(*asks)
    schedule = engine.scheduler.schedule()
    result = StepResult(
        token_ids=np.array([4, 6, 0, 0], np.int32),
        finish_codes=np.zeros(4, np.int32),
        scores=Scores(
            logprob=np.array([-2.0, -0.5, 0, 0], np.float32),
            rank=np.array([3, 1, 0, 0], np.int32),
            top_ids=np.array([[1, 2, 4], [6, 1, 2], [0] * 3, [0] * 3], np.int32),
            top_logprobs=np.array(
                [[-0.25, -1, -2], [-0.5, -1.5, -2], [0] * 3, [0] * 3], np.float32
            ),
            log_total=np.zeros(4, np.float32),
        ),
    )
    assert engine.scheduler.update(schedule, result) == asks
    assert asks[0].output_logprobs == [{4: (-2.0, 3)}]
    assert asks[1].output_logprobs == [{6: (-0.5, 1), 1: (-1.5, 2)}]
    assert list(asks[1].output_logprobs[0]) == [6, 1]
    assert asks[1].cumulative_logprob == -0.5
