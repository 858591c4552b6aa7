"""Decides what each step does: who gets a slot, which chunks are filled, who decodes.

Pure Python, no arrays, no device, no text. The loop calls `schedule`, runs the step,
and calls `update` with what was sampled; it may schedule one step before it updates
with the step before (results are looked up by the slots stored in their Schedule).
"""

import time
from collections import deque
from collections.abc import Callable

from headrace.configs.schema import EngineConfig
from headrace.engine.compaction import plan_swaps, swaps_to_sources
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.outputs import FinishReason
from headrace.engine.request import Request, RequestStatus
from headrace.engine.schedule import (
    FINISH_RUNNING,
    FINISH_STOP,
    PrefillChunk,
    Schedule,
    StepResult,
    pick_prefill_shape,
)


class Scheduler:
    """First come, first served continuous batching; or the `static` baseline.

    A request holds its slot and all the pages it may need from admission to its end.
    "static" (Orca's "before") fills the slots only when the whole batch is done.

    NOTE: a chunk's length depends on its request alone, so that company cannot change
    a prompt's numerics: T_max (the longest prefill bucket) while more than T_max
    remains, then the rest.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts empty.

        Args:
          config: resolved (without Nones).
          manager: the pool's pages; this scheduler alone takes from it.
          clock: seconds; stamps first tokens and ends.
        """
        assert config.num_slots is not None and config.prefill_shapes is not None
        assert config.decode_batch_sizes is not None
        self._config = config
        self._manager = manager
        self._clock = clock
        self._is_static = config.policy == "static"
        self._prefill_shapes = config.prefill_shapes
        self._decode_batch_sizes = config.decode_batch_sizes
        self._max_chunk = max(tokens for _, tokens in config.prefill_shapes)
        # Live requests; each is in exactly one of the three below, in FCFS order.
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[Request] = deque()
        self._decoding: dict[str, Request] = {}
        # Who holds each slot; in static also ended requests, till the batch is done.
        self._slots: list[Request | None] = [None] * config.num_slots
        self._to_release: list[int] = []
        self._prefills_since_decode = 0

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and have not ended."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return self._slots.count(None)

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          ValueError: its id belongs to a live request, or it was added before.
        """
        if request.request_id in self._requests:
            raise ValueError(
                f"request_id must be unique among live requests, got "
                f"{request.request_id!r} again"
            )
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"a request can be added once, got a {request.status}")
        # make_request has refused what the whole pool could not hold.
        num_pages = self._manager.pages_for(request.max_len)
        assert num_pages < self._manager.num_pages
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request now, with the tokens it has; None if it is not live.

        The next schedule releases its row on the device.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        elif request.slot is not None:
            self._to_release.append(request.slot)
        self._finish(request, "abort")
        return request

    def schedule(self) -> Schedule | None:
        """The next step, or None where nothing can be done now.

        None while `has_work` is only possible if a step's results are still to come.
        """
        self._admit()
        chunks = self._pick_chunks()
        decode = self._pick_decode(does_prefill=bool(chunks))
        if not chunks and not decode:
            return None
        # From here on a step is certain, so moves and releases cannot get lost.
        sources = self._compact()
        released, self._to_release = tuple(self._to_release), []
        prefill = tuple([self._advance_prefill(*chunk) for chunk in chunks])
        for request in decode:
            request.num_dispatched += 1
        return Schedule(
            slot_sources=sources,
            released=released,
            prefill=prefill,
            decode=tuple(decode),
            decode_slots=tuple([_slot_of(request) for request in decode]),
            num_rows=self._num_rows(),
        )

    def update(self, schedule: Schedule, result: StepResult) -> list[Request]:
        """Takes in what a scheduled step sampled.

        Args:
          schedule: what this scheduler asked of the step.
          result: what came of it, rows by the slots of `schedule`.

        Returns:
          Requests that got a token, ended ones included; prefilled ones first.
        """
        rows = [(c.request, c.slot) for c in schedule.prefill if c.is_last]
        rows += zip(schedule.decode, schedule.decode_slots, strict=True)
        if not rows:
            return []
        now_s = self._clock()
        token_ids = result.token_ids.tolist()
        finish_codes = result.finish_codes.tolist()
        updated = []
        for request, slot in rows:
            if request.is_finished:
                continue  # aborted, or ended by a step read after this was scheduled
            if request.first_token_s is None:
                request.first_token_s = now_s
            request.output_token_ids.append(token_ids[slot])
            if request.params.logprobs is not None:
                entries = result.logprobs_at(slot, request.params.logprobs)
                request.output_logprobs.append(entries)
                request.cumulative_logprob += entries[token_ids[slot]][0]
            if finish_codes[slot] != FINISH_RUNNING:
                self._finish_on_device(request, finish_codes[slot])
            updated.append(request)
        return updated

    def _finish_on_device(self, request: Request, finish_code: int) -> None:
        """Ends a request whose row the device has already ended."""
        token_id = request.output_token_ids[-1]
        if finish_code == FINISH_STOP:
            if token_id in request.params.stop_token_ids:
                request.stop_reason = token_id
            self._finish(request, "stop")
        else:
            assert len(request.output_token_ids) == request.max_tokens
            self._finish(request, "length")

    def _admit(self) -> None:
        """Gives slots and pages to the head of the queue, while both suffice."""
        if self._is_static and self.num_running:
            return
        num_free = self.num_free_slots if self._waiting else 0
        while self._waiting and num_free:
            request = self._waiting[0]
            pages = self._manager.allocate(self._manager.pages_for(request.max_len))
            if pages is None:
                return  # nobody overtakes: a large request is never starved
            request.pages = pages
            request.slot = self._slots.index(None)  # the lowest
            self._slots[request.slot] = request
            request.status = RequestStatus.PREFILLING
            self._prefilling.append(self._waiting.popleft())
            num_free -= 1

    def _pick_chunks(self) -> list[tuple[Request, int]]:
        """Next chunks for one prefill call: (request, length), first come first.

        Takes requests in order while one bucket holds all their chunks, and stops at
        the first that does not fit: a later one never overtakes it.
        """
        chunks: list[tuple[Request, int]] = []
        longest = 0
        for request in self._prefilling:
            left = request.prompt_len - request.num_prefilled
            length = min(left, self._max_chunk)
            longest = max(longest, length)
            rows = len(chunks) + 1
            if not pick_prefill_shape(self._prefill_shapes, rows=rows, tokens=longest):
                break
            chunks.append((request, length))
        return chunks

    def _pick_decode(self, *, does_prefill: bool) -> list[Request]:
        """All requests that can decode, or none while prefill calls go first."""
        decode = [r for r in self._decoding.values() if r.num_dispatched < r.max_tokens]
        if not decode or not does_prefill:
            self._prefills_since_decode = 0
            return decode
        self._prefills_since_decode += 1
        limit = self._config.prefill_calls_per_decode
        if self._is_static or self._prefills_since_decode < limit:
            return []
        self._prefills_since_decode = 0
        return decode

    def _advance_prefill(self, request: Request, length: int) -> PrefillChunk:
        """Counts a chunk as done; the last one makes its request decode next step."""
        start = request.num_prefilled
        request.num_prefilled += length
        is_last = request.num_prefilled == request.prompt_len
        if is_last:
            self._prefilling.remove(request)
            request.status = RequestStatus.DECODING
            request.num_dispatched = 1
            self._decoding[request.request_id] = request
        return PrefillChunk(
            request=request,
            slot=_slot_of(request),
            start=start,
            length=length,
            is_last=is_last,
        )

    def _compact(self) -> tuple[int, ...] | None:
        """Moves requests down where that saves a decode bucket; None: nothing moved.

        Static batches have no holes to move into: they keep their slots to the end.
        """
        is_taken = [holder is not None for holder in self._slots]
        swaps = plan_swaps(is_taken, self._decode_batch_sizes)
        if not swaps:
            return None
        for low, high in swaps:
            request = self._slots[high]
            assert request is not None and self._slots[low] is None
            request.slot = low
            self._slots[low], self._slots[high] = request, None
        sources = swaps_to_sources(swaps, len(self._slots))
        # The row of an aborted request moved as well: swaps are their own inverse.
        self._to_release = [sources[slot] for slot in self._to_release]
        return sources

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request and gives its pages and (not in static) its slot back."""
        if request.status is RequestStatus.PREFILLING:
            self._prefilling.remove(request)
        self._decoding.pop(request.request_id, None)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_s = self._clock()
        self._manager.free(request.pages)
        request.pages = []
        if self._is_static:
            if not self.num_running:  # the whole batch is done
                self._slots = [None] * len(self._slots)
        elif request.slot is not None:
            self._slots[request.slot] = None

    def _num_rows(self) -> int:
        """1 + the highest taken slot."""
        return max(s for s, holder in enumerate(self._slots) if holder is not None) + 1


def _slot_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot
