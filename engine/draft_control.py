"""When to draft: only while a step with drafts gives tokens sooner than one without.

What steps cost was measured at start, per decode bucket; how many tokens a row gets for
it follows from the last steps with drafts. While drafts are off they are tried again
now and then, for a bounded share of the time. No jax.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.schedule import Schedule, StepResult, pick_decode_bucket

# Trials take this share of the time at most, and so many rows or steps each.
TRIAL_SHARE = 0.01
_TRIAL_ROWS, _TRIAL_STEPS = 8, 2
# What the first trial may cost, in steps without drafts.
_FIRST_CREDIT = 8.0
# Weight of a row of the last step in the running means.
_ROW_WEIGHT = 1 / 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassCosts:
    """Seconds of one decode step of a bucket, forward and sample.

    Attributes:
      plain: without drafts.
      bare: with drafting, where no row gets any.
      full: with all drafts of all rows.
      drafting: of `full`, what the proposer takes.
    """

    plain: float
    bare: float
    full: float
    drafting: float

    def drafted(self, share: float) -> float:
        """Of a step that verifies this share of all drafts that there could be."""
        return self.bare + (self.full - self.bare) * share


class DraftControl:
    """Decides for each step whether it drafts, and books the time of drafting.

    Args:
      config: resolved, as the probe left it.
      costs: by decode bucket.
    """

    def __init__(self, config: EngineConfig, costs: Mapping[int, PassCosts]) -> None:
        self._num_drafts = config.drafts_per_pass
        self._adapts = config.adapts_drafts
        self._buckets, self._costs = config.decode_batch_sizes or (), costs
        self._is_on = False
        # Steps of the running trial that are still to be dispatched, and to be read.
        self._untried = self._unread = 0
        self._credit = _FIRST_CREDIT
        self._tokens_per_row = self._share = 0.0
        self._num_rows = 0
        self._steps_s = self._drafting_s = 0.0
        self._steps = self._drafted_steps = 0

    def wants_drafts(self, schedule: Schedule) -> bool:
        """Whether the next step, of these rows, verifies drafts."""
        rows = len(schedule.decode)
        if not self._num_drafts or not rows:
            return False
        if not self._adapts or self._is_on:
            return True
        if not self._untried and not self._unread:
            self._credit += TRIAL_SHARE
            self._try_if_cheap(rows, self._costs_of(schedule))
        if self._untried:
            self._untried -= 1
            return True
        return False

    def on_step(self, schedule: Schedule, result: StepResult, did_draft: bool) -> None:
        """Takes in what a step gave, in the order in which steps were dispatched."""
        rows = len(schedule.decode)
        if not rows or result.num_tokens is None or result.num_drafts is None:
            return  # nothing decoded, or nobody drafts
        costs, slots = self._costs_of(schedule), schedule.decode_slots
        share = float(result.num_drafts[slots].sum()) / (rows * self._num_drafts)
        self._steps += 1
        self._drafted_steps += did_draft
        self._steps_s += costs.drafted(share) if did_draft else costs.plain
        if not did_draft:
            return
        self._drafting_s += costs.drafting
        self._num_rows += rows
        weight = max(min(1.0, rows * _ROW_WEIGHT), rows / self._num_rows)
        tokens = float(np.mean(result.num_tokens[slots]))
        self._tokens_per_row += weight * (tokens - self._tokens_per_row)
        self._share += weight * (share - self._share)
        self._unread = max(0, self._unread - 1)
        if not self._unread:
            cost = costs.drafted(self._share)
            self._is_on = self._tokens_per_row * costs.plain > cost

    def snapshot(self) -> dict[str, Any]:
        """JSON-ready. The share of time is by the costs that were measured at start."""
        share = self._drafting_s / self._steps_s if self._steps_s else 0.0
        return {
            "steps": self._steps,
            "drafted_steps": self._drafted_steps,
            "drafting_time_share": share,
        }

    def _try_if_cheap(self, rows: int, costs: PassCosts) -> None:
        steps = max(_TRIAL_STEPS, -(-_TRIAL_ROWS // rows))
        # At its worst: all drafts, none of them right.
        price = steps * max(0.0, costs.full / costs.plain - 1)
        could_pay = costs.bare < costs.plain * (1 + self._num_drafts)
        if could_pay and self._credit >= price:
            self._credit -= price
            self._untried = self._unread = steps
            self._tokens_per_row = self._share = 0.0
            self._num_rows = 0

    def _costs_of(self, schedule: Schedule) -> PassCosts:
        return self._costs[pick_decode_bucket(self._buckets, schedule.num_rows)]
