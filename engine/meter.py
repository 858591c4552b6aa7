"""Tells metrics and ledger what happened in a turn, each event once. No jax."""

import time
from typing import Any

from headrace.engine.batch import StepPlan
from headrace.engine.draft_stats import DraftStats
from headrace.engine.metrics import Metrics, RequestTimes, StepFacts
from headrace.engine.request import Request
from headrace.engine.schedule import Fork, PrefillChunk, Schedule, StepResult
from headrace.engine.usage import UsageLedger


class Meter:
    """Turns schedules and requests into the events of `Metrics` and `UsageLedger`.

    Args:
      max_context_len: where the length histograms end.
      num_drafts: most drafts per row and pass.
    """

    def __init__(self, max_context_len: int, num_drafts: int = 0) -> None:
        self.metrics = Metrics(max_context_len=max_context_len)
        self._last_read_s: float | None = None
        self._num_preemptions = 0
        self.usage = UsageLedger()
        self.drafts = DraftStats(num_drafts)
        # Requests that have begun and not ended, by number.
        self._live: dict[int, Request] = {}

    def count_preemptions(self, total: int) -> None:
        """Books those since the last call."""
        for _ in range(total - self._num_preemptions):
            self.metrics.on_preempt()
        self._num_preemptions = total

    def count_step(
        self, schedule: Schedule, plan: StepPlan, num_tokens: int, begun_s: float
    ) -> None:
        """A step was read, which gave `num_tokens` tokens.

        Args:
          begun_s: when it was dispatched, seconds of the engine's clock.
        """
        now_s = time.perf_counter()
        # Steps run one after the other: it began when the one before ended, at which
        # the host read it, unless the device was idle by then.
        self.usage.on_step(now_s - max(begun_s, self._last_read_s or 0.0), schedule)
        rows = len(schedule.decode)
        self.metrics.on_step(
            StepFacts(
                prefill_tokens=sum(chunk.length for chunk in schedule.prefill),
                decode_rows=rows,
                decode_bucket_rows=plan.decode_bucket,
                output_tokens=num_tokens,
            )
        )
        if rows and self._last_read_s is not None:
            self.metrics.on_tokens(now_s - self._last_read_s, rows)
        self._last_read_s = now_s

    def count_token(self, request: Request) -> None:
        """A request got a token; it may be its first or its last."""
        if len(request.output_token_ids) == 1 and request.first_token_s is not None:
            self.metrics.on_first_token(request.first_token_s - request.arrival_s)
        if request.is_finished:
            self.count_end(request)

    def count_end(self, request: Request) -> None:
        """A request has ended."""
        assert request.finished_s is not None and request.finish_reason is not None
        self._live.pop(request.number, None)
        self.usage.on_finish(request)
        self.metrics.on_finish(
            RequestTimes(
                arrival_s=request.arrival_s,
                admitted_s=request.admitted_s,
                first_token_s=request.first_token_s,
                finished_s=request.finished_s,
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=len(request.output_token_ids),
                max_tokens=request.max_tokens,
                finish_reason=request.finish_reason,
            )
        )

    def snapshot(self, running: int, waiting: int, kv_usage: float) -> dict[str, Any]:
        """`Metrics.snapshot`, and "tenants" of `UsageLedger.snapshot`."""
        return self.metrics.snapshot(running, waiting, kv_usage) | {
            "tenants": self.usage.snapshot(self._live.values()),
        }

    def count_read(self, schedule: Schedule, result: StepResult) -> None:
        """A step was read: books its drafts, and requests whose first step it is."""
        self.drafts.on_step(schedule, result)
        begun: list[PrefillChunk | Fork] = [*schedule.prefill, *schedule.forks]
        for row in begun:
            request = row.request
            if request.is_metered:
                continue
            request.is_metered = True
            if not request.is_finished:  # by a cancel, before its step was read
                self._live[request.number] = request
            # A fork looks nothing up: it shares its leader's pages.
            asks = request.uses_cache and isinstance(row, PrefillChunk)
            asked = request.prompt_len if asks else 0
            self.metrics.on_admit(request.prompt_len, request.num_cached, asked)
            self.usage.on_admit(request)
