"""Drafts are on where they pay, off where not, and are tried at a bounded cost."""

import dataclasses

import numpy as np
import pytest

from headrace import EngineConfig
from headrace.engine.draft_control import TRIAL_SHARE, DraftControl, PassCosts
from headrace.engine.schedule import Schedule, StepResult

K = 3
CONFIG = EngineConfig(
    draft="prompt-lookup", num_drafts=K, num_slots=32, decode_batch_sizes=(1, 8, 32)
)
COSTS = {
    1: PassCosts(plain=1.0, bare=1.05, full=1.6, drafting=0.05),
    8: PassCosts(plain=2.0, bare=2.2, full=5.0, drafting=0.2),
    32: PassCosts(plain=4.0, bare=4.4, full=14.0, drafting=0.4),
}


class Steps:
    """Runs steps one after the other, each read after the next was dispatched."""

    def __init__(self, control, accepted):
        self.control, self.accepted, self.pending = control, accepted, None
        self.rng = np.random.default_rng(0)

    def run(self, rows, count):
        """Which of the steps had drafts."""
        choices = []
        for _ in range(count):
            schedule = Schedule(
                decode=(None,) * rows, decode_slots=np.arange(rows), num_rows=rows
            )
            drafts = self.control.wants_drafts(schedule)
            if self.pending is not None:
                self.control.on_step(*self.pending)
            is_right = self.rng.random((rows, K * drafts)) < self.accepted
            right = np.cumprod(is_right, axis=1).sum(axis=1)
            result = StepResult(
                token_ids=np.zeros(rows), finish_codes=np.zeros(rows),
                num_tokens=1 + right, num_drafts=np.full(rows, K * drafts),
            )  # fmt: skip
            self.pending = schedule, result, drafts
            choices.append(drafts)
        return np.array(choices)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_wrong_drafts_go_off_and_trials_take_a_bounded_share(rows):
    steps = Steps(DraftControl(CONFIG, COSTS), accepted=0.0)
    choices = steps.run(rows, 8000)
    costs = COSTS[rows]
    extra = choices.sum() * (costs.full / costs.plain - 1)
    first = 8.0  # what the first trial may cost
    assert extra <= first + TRIAL_SHARE * len(choices)
    assert 0 < choices.sum()
    later = choices[4000:].sum()
    assert 0 < later < 200  # still tried, seldom


@pytest.mark.parametrize(("rows", "accepted"), [(1, 0.6), (8, 0.95)])
def test_right_drafts_go_on_and_stay_on(rows, accepted):
    steps = Steps(DraftControl(CONFIG, COSTS), accepted)
    choices = steps.run(rows, 1000)
    assert choices[100:].mean() > 0.9


def test_what_pays_for_one_row_is_off_for_many_and_on_again():
    steps = Steps(DraftControl(CONFIG, COSTS), accepted=0.7)
    assert steps.run(1, 300)[100:].mean() > 0.9
    assert steps.run(32, 600)[10:].mean() < 0.1
    assert steps.run(1, 1500)[-100:].mean() > 0.9


def test_drafts_that_come_right_later_are_found_out():
    steps = Steps(DraftControl(CONFIG, COSTS), accepted=0.0)
    assert steps.run(1, 2000)[-200:].mean() < 0.1
    steps.accepted = 0.9
    assert steps.run(1, 3000)[-100:].mean() > 0.9


def test_a_step_that_costs_all_its_tokens_is_never_tried():
    dear = {8: PassCosts(plain=1.0, bare=4.0, full=9.0, drafting=0.1)}
    steps = Steps(DraftControl(CONFIG, dear | {1: dear[8], 32: dear[8]}), 1.0)
    assert not steps.run(8, 500).any()


def test_without_adapting_every_step_drafts():
    config = dataclasses.replace(CONFIG, adapts_drafts=False)
    control = DraftControl(config, COSTS)
    steps = Steps(control, accepted=0.0)
    assert steps.run(8, 50).all()
    found = control.snapshot()
    assert found["steps"] == found["drafted_steps"] == 49  # the last is not read
    assert found["drafting_time_share"] == pytest.approx(0.2 / 5.0)
    nobody = DraftControl(dataclasses.replace(CONFIG, draft=None), {})
    assert not nobody.wants_drafts(Schedule(decode=(None,), num_rows=1))
