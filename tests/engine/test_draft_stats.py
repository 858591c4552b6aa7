"""Counts of drafts are those of live rows only."""

import types

import numpy as np

from headrace.engine.draft_stats import DraftStats
from headrace.engine.schedule import Schedule, StepResult


def step(drafts, tokens, ended=()):
    """A step whose slot i holds a request, some of which have ended meanwhile."""
    requests = tuple(
        types.SimpleNamespace(finish_reason="stop" if slot in ended else None)
        for slot in range(len(drafts))
    )
    slots = np.arange(len(drafts))
    schedule = Schedule(decode=requests, decode_slots=slots, num_rows=len(drafts))
    nothing = np.zeros(len(drafts), np.int32)
    result = StepResult(
        token_ids=nothing,
        finish_codes=nothing,
        num_drafts=np.array(drafts),
        num_tokens=np.array(tokens),
    )
    return schedule, result


def test_tried_and_accepted_are_told_by_position():
    stats = DraftStats(3)
    stats.on_step(*step([3, 0, 2, 3], [2, 1, 3, 4], ended=[3]))
    stats.on_step(*step([1], [1]))
    assert stats.snapshot() == {
        "passes": 4,
        "num_drafts": 3,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 3,
        "num_draft_tokens_per_pos": [3, 2, 1],
        "num_accepted_tokens_per_pos": [2, 1, 0],
        "tokens_per_pass": 7 / 4,
    }


def test_an_engine_without_drafts_tells_of_none():
    stats = DraftStats(0)
    schedule, result = step([0], [1])
    stats.on_step(schedule, StepResult(token_ids=result.token_ids, finish_codes=[0]))
    assert stats.snapshot() == {}
