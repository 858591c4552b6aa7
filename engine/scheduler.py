"""Decides what each step does: who gets a slot, which chunks are filled, who decodes.

Pure host code: no device, no text. The loop calls `schedule`, runs the step, and calls
`update` with what was sampled; it may schedule one step before it updates with the
step before (results are looked up by the slots stored in their Schedule).
"""

import time
from collections.abc import Callable

import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.admission import can_go_on
from headrace.engine.device_changes import DeviceChanges
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.lifecycle import Lifecycle
from headrace.engine.outputs import TIME_OVER, FinishReason
from headrace.engine.packed_layout import num_packed_rows
from headrace.engine.prompt_scores import book_prompt_scores
from headrace.engine.request import Request, RequestStatus
from headrace.engine.schedule import (
    Fork,
    PrefillChunk,
    Resumption,
    RowNeeds,
    Schedule,
    StepResult,
    fresh_rows,
)


class Scheduler:
    """Continuous batching over pages that grow as requests do.

    NOTE: a chunk's length depends on its request alone, so that company cannot change
    a prompt's numerics: T_max (the longest prefill bucket) while more than T_max
    remains, then the rest.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        clock: Callable[[], float] = time.perf_counter,
        *,
        num_host_pages: int = 0,
        caches_output: bool = False,
    ) -> None:
        """Starts empty.

        Args:
          config: resolved (without Nones).
          manager: the pool's pages; this scheduler alone takes from it.
          clock: seconds; stamps admissions, first tokens and ends.
          num_host_pages: room for the pages of preempted requests in invariant mode.
          caches_output: pages that decoding filled may serve other requests, too.
        """
        assert config.prefill_shapes is not None
        self._config = config
        self._manager = manager
        self._clock = clock
        self._is_static = config.policy == "static"
        self._max_rows = num_packed_rows(config)
        self._life = Lifecycle(config, manager, clock, num_host_pages, caches_output)
        self._running = self._life.running
        self._num_added = 0
        self._prefills_since_decode = 0

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._life.requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and have not ended."""
        return self._life.num_running

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return len(self._life.admission.queue)

    @property
    def num_preemptions(self) -> int:
        """Times that a running request gave way, since start."""
        return self._life.num_preemptions

    def add(self, *requests: Request) -> None:
        """Puts a request and its siblings into the queue: all of them, or none.

        Raises:
          ValueError: an id belongs to a live request, one was added before, or the
            queue could never hold them.
          QueueFullError: a bound of the queue is reached.
        """
        life = self._life
        for request in requests:
            if request.request_id in life.requests:
                raise ValueError(
                    f"request_id must be unique among live requests, got "
                    f"{request.request_id!r} again"
                )
            if request.status is not RequestStatus.WAITING or request.number >= 0:
                raise ValueError(f"a request can be added once, got a {request.status}")
            # make_request has refused what the whole pool could not hold.
            num_pages = self._manager.pages_for(request.max_len)
            assert num_pages < self._manager.num_pages
        tokens = sum(request.prompt_len for request in requests)
        tenant = requests[0].tenant  # siblings have the same
        life.admission.check_room(tenant, len(requests), tokens)
        if tenant is not None:
            tenants = {other.tenant for other in life.requests.values()}
            life.admission.queue.come_back(tenant, tenants)
        for request in requests:
            request.number = self._num_added
            self._num_added += 1
            life.admission.add(request)
            life.requests[request.request_id] = request

    def abort(
        self, request_id: str, reason: FinishReason = "cancelled"
    ) -> Request | None:
        """Ends a request now, with the tokens it has; None if it is not live.

        The next schedule releases its row on the device.
        """
        request = self._life.requests.get(request_id)
        if request is None:
            return None
        if request.status in (RequestStatus.PREFILLING, RequestStatus.DECODING):
            self._life.changes.released.append(_slot_of(request))
        self._life.finish(request, reason)
        return request

    def take_ended(self) -> list[Request]:
        """Requests that have ended without a token since the last call."""
        ended, self._life.ended = self._life.ended, []
        return ended

    def schedule(self) -> Schedule | None:
        """The next step, or None where nothing can be done now.

        None while `has_work` means that a step's results are still to come, or that
        an idle engine waits for more prompts (`max_queue_delay_s`).
        """
        now_s, life = self._clock(), self._life
        for request, is_queue in life.admission.overdue(now_s):
            request.finish_message = TIME_OVER[is_queue]
            self.abort(request.request_id, "rejected" if is_queue else "deadline")
            life.ended.append(request)
        life.grow()
        self._admit(now_s)
        chunks = life.prefilling.pick(
            num_decoding=life.num_decoding, num_resumed=len(life.changes.resumed)
        )
        does_decode = self._does_decode(does_prefill=bool(chunks))
        if not (chunks or does_decode or life.changes.saves or life.changes.loads):
            return None
        # From here on a step is certain, so moves and releases cannot get lost.
        schedule = self._build(chunks, does_decode)
        for request in schedule.decode:
            request.num_dispatched += 1
        if schedule.decode:
            self._running.count_decode()
        for chunk in schedule.prefill:
            if chunk.is_last:  # decodes from the next step on
                life.start_decode(chunk.request)
        for fork in schedule.forks:
            life.fork(schedule.prefill[fork.source].request, fork.request)
        return schedule

    def _build(self, chunks: list[tuple[Request, int]], does_decode: bool) -> Schedule:
        changes, self._life.changes = self._life.changes, DeviceChanges()
        sources = self._running.compact()
        released = changes.released
        if sources is not None:
            # Rows of ended requests moved as well: swaps are their own inverse.
            released = [sources[slot] for slot in released]
        decode, slots = self._running.decode_rows() if does_decode else ((), _NO_SLOTS)
        grown = [(_slot_of(r), page) for r, page in changes.grown if not r.is_finished]
        prefill, forks = self._advance_prefill(chunks)
        fresh = [row.request for row in fresh_rows(prefill, forks)]
        needs = RowNeeds.of(fresh) if fresh else RowNeeds()
        if decode:
            needs |= self._running.decode_needs()
        rows = self._running.extra_rows
        begin = [(r, rows[_slot_of(r)]) for r in (*changes.resumed, *fresh)]
        return Schedule(
            slot_sources=sources,
            released=tuple(released),
            new_pages=tuple(grown),
            copies=tuple(changes.copies),
            saves=tuple(changes.saves),
            loads=tuple(changes.loads),
            resumed=tuple([Resumption.of(request) for request in changes.resumed]),
            prefill=prefill,
            forks=forks,
            histories=tuple(begin),
            extras=tuple([one for one in begin if one[0].params.has_extras]),
            needs=needs,
            decode=decode,
            decode_slots=slots,
            num_rows=self._running.num_rows,
        )

    def update(self, schedule: Schedule, result: StepResult) -> list[Request]:
        """Takes in what a scheduled step sampled.

        Args:
          schedule: what this scheduler asked of the step.
          result: what came of it, rows by the slots of `schedule`.

        Returns:
          Requests that got a token, ended ones included; prefilled ones first.
        """
        if result.prompt_scores is not None:
            book_prompt_scores(schedule.prefill, result.prompt_scores)
        if result.num_tokens is not None:
            self._running.settle(schedule, result.num_tokens)
        fresh = schedule.fresh
        requests = [*(row.request for row in fresh), *schedule.decode]
        if not requests:
            return []
        slots = [row.slot for row in fresh]
        slots += schedule.decode_slots.tolist()
        return self._life.book(requests, slots, result)

    def _admit(self, now_s: float) -> None:
        """Gives slots and pages in the queue's order, while both suffice."""
        life, queue = self._life, self._life.admission.queue
        if not len(queue) or (self._is_static and life.num_running):
            return
        if self._config.policy == "fair" and not self._running.num_free:
            life.make_way()
        free = self._running.num_free
        if not life.num_running and life.admission.should_wait(now_s, free):
            return
        taken: dict[Request, bool] = {}  # and whether it follows its leader
        spare_rows = self._max_rows
        for request in queue.candidates() if free else ():
            if len(taken) == free:
                break
            if not can_go_on(request, spare_rows):
                continue
            follows = life.prefilling.can_follow(request, taken)
            has_pages = life.admission.take_pages(request, follows=follows)
            if has_pages is False:
                break  # nobody overtakes: a large request is never starved
            if has_pages:
                taken[request] = follows
                spare_rows -= bool(request.host_pages)
        for request, follows in taken.items():
            life.begin(request, now_s, follows=follows)

    def _does_decode(self, *, does_prefill: bool) -> bool:
        """Whether all that can decode do, or none while prefill calls go first."""
        if not self._running.decode_rows()[0]:
            self._prefills_since_decode = 0
            return False
        if does_prefill:
            self._prefills_since_decode += 1
            limit = self._config.prefill_calls_per_decode
            if self._is_static or self._prefills_since_decode < limit:
                return False
        self._prefills_since_decode = 0
        return True

    def _advance_prefill(
        self, picked: list[tuple[Request, int]]
    ) -> tuple[tuple[PrefillChunk, ...], tuple[Fork, ...]]:
        """Counts chunks as done; a last one makes its request decode next step."""
        chunks, forks = [], []
        for index, (request, length) in enumerate(picked):
            start, served = self._life.prefilling.advance(request, length)
            end = start + length
            self._life.admission.remember_filled(request, start, end)
            request.num_dispatched += end == request.fill_len
            chunk = PrefillChunk(
                request=request,
                slot=_slot_of(request),
                start=start,
                length=length,
                is_last=end == request.fill_len,
            )
            chunks.append(chunk)
            forks += [Fork(request=r, slot=_slot_of(r), source=index) for r in served]
        return tuple(chunks), tuple(forks)


_NO_SLOTS = np.zeros(0, np.int64)


def _slot_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot
