"""The one loop that drives everything, one turn at a time.

    schedule -> plan (pad, pack) -> dispatch forward and sample
             -> read the step before -> update

A turn dispatches step N + 1 before it reads step N, so the device does not wait for
the host. Owns scheduler, pages, runner, and each request's output; `LLM` and
`AsyncLLM` are the ways to hold it.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.batch import StepPlan, plan_step
from headrace.engine.draft_control import DraftControl
from headrace.engine.grammar_rows import advance_grammar, fill_masks
from headrace.engine.interrupts import interrupts_wait
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.meter import Meter
from headrace.engine.model_runner import ModelRunner
from headrace.engine.new_request import (
    make_request,
    make_siblings,
    name_request,
    set_deadlines,
)
from headrace.engine.outputs import FinishReason
from headrace.engine.request import Request, RequestStatus
from headrace.engine.request_state import CompletionState, RequestState
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import Schedule, StepResult
from headrace.engine.scheduler import Scheduler
from headrace.engine.text_rules import TextRules, TokenRules
from headrace.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EngineLoop:
    """Takes requests, runs turns, hands out what came of them.

    Every method may be called from any thread; `turn` runs by one at a time.

    Args:
      runner: compiled and warmed up.
      config: resolved, with the buckets that the probe left.
      model_config: of the runner's model.
      tokenizer: None where the model has none.
      identity: changes with the weights; cached pages are named after it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        tokenizer: Tokenizer | None,
        identity: str,
    ) -> None:
        assert config.num_pages and config.max_context_len
        self._runner, self._config, self._model_config = runner, config, model_config
        self._tokenizer = tokenizer
        self.text_rules = TextRules(tokenizer, model_config, config)
        self._identity = identity
        self._manager = KVCacheManager(config.num_pages, config.page_size)
        self._scheduler = Scheduler(
            config,
            self._manager,
            num_host_pages=runner.host_pages.num_pages,
            caches_output=runner.ledger.caches_output,
        )
        # By the id of each completion's own request.
        self._states: dict[str, tuple[RequestState, CompletionState]] = {}
        self._ids = itertools.count()
        self._in_flight: tuple[Schedule, StepPlan, float] | None = None
        self._failure: str | None = None
        self.meter = Meter(config.max_context_len, config.drafts_per_pass)
        self._control = DraftControl(config, runner.ledger.pass_costs)
        self.lock = threading.RLock()

    @property
    def has_work(self) -> bool:
        """Some request has not ended, or a step was not read."""
        return self._scheduler.has_work or self._in_flight is not None

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        rules: TokenRules | None = None,
        priority: int = 0,
        tenant: str | None = None,
        uses_cache: bool = True,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
    ) -> RequestState:
        """Puts a request into the queue.

        Args:
          token_ids: of the prompt.
          params: the user's.
          prompt: the text behind the ids, for the output.
          rules: of `params`, where they are resolved already.
          priority: lower runs first, under the policy "priority".
          tenant: shares pages and a fair share with its own requests only.
          uses_cache: may reuse pages and lets others reuse its own.
          deadline_s: seconds from now after which it ends with what it has.
          queue_timeout_s: seconds from now after which it ends if it has not begun.

        Raises:
          ValueError: the prompt or a value is out of its range.
          QueueFullError: the queue's bound is reached.
          RuntimeError: the engine has failed, or is closed.
        """
        self._check_alive()
        rules = rules or self.text_rules.resolve(params)  # not under the lock: long
        with self.lock:
            self._check_alive()
            request = make_request(
                str(next(self._ids)),
                token_ids,
                params,
                prompt=prompt,
                model_config=self._model_config,
                engine_config=self._config,
                rules=rules,
            )
            if self._config.multi_tenant and not tenant:
                raise ValueError("multi_tenant is on: a request must name its tenant")
            request.priority, request.tenant = priority, tenant
            set_deadlines(request, deadline_s, queue_timeout_s)
            request.uses_cache = uses_cache and self._config.prefix_cache
            if request.uses_cache:
                name_request(request, self._identity, self._config)
            requests = make_siblings(request)
            self._scheduler.add(*requests)
            state = RequestState(requests, self._tokenizer)
            for completion in state.completions:
                self._states[completion.request.request_id] = (state, completion)
        return state

    def new_id(self) -> str:
        """An id for an output without a request."""
        return str(next(self._ids))

    def turn(self) -> list[RequestState]:
        """Dispatches the next step and takes in the one before.

        Returns:
          Requests with news: tokens, or their end.

        Raises:
          RuntimeError: the engine has failed, now or before; every request that was
            open has ended with finish_reason "error".
        """
        with self.lock, interrupts_wait():
            self._check_alive()
            try:
                return self._turn()
            except Exception as error:
                self._fail(error)
                raise RuntimeError(self._failure) from error

    def cancel(self, *states: RequestState, reason: FinishReason = "cancelled") -> None:
        """Ends requests that still run, with what they have."""
        with self.lock:
            for completion in _completions(states):
                request = completion.request
                if self._scheduler.abort(request.request_id, reason) is not None:
                    self.meter.count_end(request)
                    completion.end()

    def drop(self, *states: RequestState) -> None:
        """Forgets requests; one that still runs is ended."""
        with self.lock:
            self.cancel(*states)
            for completion in _completions(states):
                self._states.pop(completion.request.request_id, None)

    def close(self) -> None:
        """Ends every request and frees the device memory."""
        with self.lock:
            if self._failure is None:
                self._failure = "this engine is closed"
            self.cancel(*{state for state, _ in self._states.values()})
            self._runner.close()

    def stats(self) -> dict[str, Any]:
        """Counters, gauges, histograms, tenants; see metrics, usage. JSON-ready."""
        with self.lock:
            drafts = self.meter.drafts.snapshot() | self._control.snapshot()
            return self.meter.snapshot(*self._gauges()) | {
                "speculation": drafts if self._config.draft else {},
                "prefix_cache_evictions": self._manager.stats.evictions,
                "kv_pages_cached": self._manager.num_cached,
            }

    def _turn(self) -> list[RequestState]:
        schedule, runner = self._scheduler.schedule(), self._runner
        before, self._in_flight = self._in_flight, None
        if schedule is not None:
            drafts = self._control.wants_drafts(schedule)
            plan = plan_step(schedule, self._config, runner.layout, does_draft=drafts)
            runner.dispatch_forward(plan)
            self._in_flight = (schedule, plan, time.perf_counter())
            if not plan.has_grammar:
                runner.dispatch_sample(plan, None)
        self.meter.count_preemptions(self._scheduler.num_preemptions)
        updated: list[Request] = []
        if before is not None:
            updated = self._take_in(*before)
        if schedule is not None and plan.has_grammar:
            # Masks follow from the tokens just read, while `forward` runs.
            slots, words = runner.layout.num_slots, runner.num_mask_words
            mask_BW, failed = fill_masks(schedule, slots, words)
            runner.dispatch_sample(plan, mask_BW)
            for request in failed:
                self._end_early(request, "error")
                self.meter.count_end(request)
            updated += failed
        elif before is None and schedule is None and self._scheduler.has_work:
            time.sleep(0.001)  # an idle engine that waits for more prompts
        line = self.meter.metrics.log_line(time.perf_counter(), *self._gauges())
        if line is not None:
            logger.info("%s", line)
        for request in (overdue := self._scheduler.take_ended()):
            self.meter.count_end(request)
            self._states[request.request_id][1].end()
        told = dict.fromkeys((*updated, *overdue))
        return [self._states[request.request_id][0] for request in told]

    def _take_in(
        self, schedule: Schedule, plan: StepPlan, begun_s: float
    ) -> list[Request]:
        """Reads a step and books its tokens."""
        result = self._runner.read_step()
        self._control.on_step(schedule, result, plan.does_draft)
        self.meter.count_read(schedule, result)
        updated: list[Request] = []
        for part in (result, *result.later):
            updated += self._take_in_place(schedule, part)
        self.meter.count_step(schedule, plan, len(updated), begun_s)
        return updated

    def _take_in_place(self, schedule: Schedule, result: StepResult) -> list[Request]:
        """At most one token of each request."""
        updated = self._scheduler.update(schedule, result)
        for request in updated:
            completion = self._states[request.request_id][1]
            is_over = advance_grammar(request)
            completion.add_token()
            is_over |= completion.stopped_by is not None
            reason: FinishReason = "error" if request.finish_message else "stop"
            if is_over and not request.is_finished:
                self._end_early(request, reason)
            elif is_over:
                # The last token that it may have was the end. After its text: a
                # request that the device stops shows none for its last token.
                request.finish_reason = reason
            self.meter.count_token(request)
        return updated

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        """The host ends a request that the device would go on with."""
        self._scheduler.abort(request.request_id, reason)
        self._states[request.request_id][1].end()

    def _gauges(self) -> tuple[int, int, float]:
        """Running, waiting, and the share of pages in use."""
        used = self._manager.num_used / (self._manager.num_pages - 1)
        return self._scheduler.num_running, self._scheduler.num_waiting, used

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _fail(self, error: Exception) -> None:
        """Device arrays may be gone: nothing can go on, and nobody is left waiting."""
        self._failure = f"the engine has failed and must be built anew: {error}"
        for state, completion in list(self._states.values()):
            request = completion.request
            with contextlib.suppress(Exception):  # the books may be out of step, too
                self.cancel(state, reason="error")
            if not completion.is_finished:
                request.status, request.finish_reason = RequestStatus.FINISHED, "error"
                completion.end()


def _completions(states: Iterable[RequestState]) -> list[CompletionState]:
    return [completion for state in states for completion in state.completions]
