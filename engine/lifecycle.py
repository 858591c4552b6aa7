"""Moves requests between queue, prefill, decode and end, with all that they hold.

Part of the scheduler, which decides; here slots, pages and what the device must be
told (releases, page moves, new pages) stay in step with where a request is. No jax.
"""

import collections
import itertools
from collections.abc import Callable

from headrace.configs.schema import EngineConfig
from headrace.engine.admission import Admission
from headrace.engine.device_changes import DeviceChanges
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.outputs import NOTHING_ALLOWED, FinishReason
from headrace.engine.preemption import HostPool, pick_victim
from headrace.engine.prefill_line import PrefillLine
from headrace.engine.request import Request, RequestStatus
from headrace.engine.running import NO_BOUND, RunningSet
from headrace.engine.schedule import (
    FINISH_RUNNING,
    FINISH_STOP,
    FINISH_STUCK,
    PageCopy,
    PageMove,
    StepResult,
)

_RUNNING = (RequestStatus.PREFILLING, RequestStatus.DECODING)


class Lifecycle:
    """All live requests: each waits, prefills or decodes.

    Attributes:
      requests: by id.
      prefilling: requests whose prompts are not filled yet.
      changes: for the next step; whoever builds it starts a new one.
      ended: requests that have ended without a token, till somebody takes them.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        clock: Callable[[], float],
        num_host_pages: int,
        caches_output: bool,
    ) -> None:
        assert config.num_slots is not None
        assert config.decode_batch_sizes is not None
        self.requests: dict[str, Request] = {}
        self.prefilling = PrefillLine(config)
        self.num_decoding = 0
        self.num_preemptions = 0
        self.running = RunningSet(
            config.num_slots, config.decode_batch_sizes, 1 + config.drafts_per_pass
        )
        self.admission = Admission(config, manager, num_host_pages)
        self.changes = DeviceChanges()
        self.ended: list[Request] = []
        self._manager = manager
        self._clock = clock
        self._host = HostPool(num_host_pages)
        self._is_static = config.policy == "static"
        self._is_fair = config.policy == "fair"
        self._keeps_pages = config.numerics == "invariant"
        self._caches_output = caches_output

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and have not ended."""
        return len(self.prefilling) + self.num_decoding

    def begin(self, request: Request, now_s: float, *, follows: bool) -> None:
        """Starts or resumes a request that waited and has just got its pages."""
        self.admission.queue.remove(request)
        self.running.place(request)
        if request.host_pages:
            held = len(request.host_pages)
            move = PageMove(
                device=tuple(request.pages[:held]), host=tuple(request.host_pages)
            )
            self.changes.loads.append(move)
            self.changes.resumed.append(request)
            self._host.give_back(request.host_pages)
            request.host_pages = []
            self.start_decode(request)
            return
        request.status = RequestStatus.PREFILLING
        if request.admitted_s is None:
            request.admitted_s = now_s
        if follows:
            self.prefilling.follow(request)
            return
        todo = request.fill_len - request.num_prefilled
        self.admission.queue.charge(request.tenant, prompt=todo)
        self.prefilling.add(request)

    def start_decode(self, request: Request) -> None:
        """The request decodes from the next pick on."""
        assert request.slot is not None
        request.status = RequestStatus.DECODING
        self.num_decoding += 1
        self.running.start_decode(
            request.slot,
            left=request.max_tokens - request.num_dispatched,
            room=self._room(request),
        )

    def fork(self, leader: Request, follower: Request) -> None:
        """The leader's last chunk is scheduled: its follower decodes like it.

        It writes into a copy of the prompt's last page, where that is not full; the
        copy is made at the start of the next step, before anybody writes.
        """
        follower.num_dispatched += 1
        self.start_decode(follower)
        full, rest = divmod(leader.prompt_len, self._manager.page_size)
        if rest:
            copy = PageCopy(source=leader.pages[full], target=follower.pages[full])
            self.changes.copies.append(copy)

    def grow(self) -> None:
        """One more page for each request whose next token needs it.

        Where the pool is empty, running requests are preempted: lowest priority
        first, then the latest.
        """
        for slot in self.running.short_of_room().tolist():
            request = self.running.holders[slot]
            if request is None or request.status is not RequestStatus.DECODING:
                continue  # preempted for one of the others
            while (pages := self._manager.allocate(1)) is None:
                victim = self._victim(self.holders())
                assert victim is not None, "admission promised too many pages"
                self.preempt(victim)
                if victim is request:
                    break
            else:
                request.pages += pages
                self.running.room[slot] += self._manager.page_size
                if self._has_all_pages(request):
                    self.running.room[slot] = NO_BOUND
                self.changes.grown.append((request, pages[0]))

    def _has_all_pages(self, request: Request) -> bool:
        return len(request.pages) >= self._manager.pages_for(request.max_len)

    def _room(self, request: Request) -> int:
        """Tokens that fit into the request's pages beside those computed."""
        if self._has_all_pages(request):
            return NO_BOUND
        return len(request.pages) * self._manager.page_size - request.num_computed

    def make_way(self) -> None:
        """Where no slot is free, tenants that wait take some from those best served.

        For the policy "fair": so a flood of one tenant delays another's requests by
        few steps, not until some of the flood end. It is over when nobody who waits
        has two slots fewer than another who was served more. At most 8 at a time.
        """
        queue = self.admission.queue
        counts = collections.Counter(holder.tenant for holder in self.holders())
        for first in [r.tenant for r in itertools.islice(queue.candidates(), 8)]:
            # No slot must fall back to whom it was taken from.
            richer = [t for t in counts if queue.served(t) > queue.served(first)]
            rich = max(richer, key=lambda tenant: counts[tenant], default=first)
            victim = self._victim([r for r in self.holders() if r.tenant == rich])
            if counts[first] + 1 >= counts[rich] or victim is None:
                return
            self.preempt(victim)
            counts.update({first: 1, rich: -1})

    def holders(self) -> list[Request]:
        """Requests that run, by slot."""
        return [r for r in self.running.holders if r and r.status in _RUNNING]

    def preempt(self, request: Request) -> None:
        """Takes slot and pages from a running request and queues it again.

        In invariant mode a request that decodes keeps its keys and values: its pages
        move to the host pool and come back bit for bit. In fast mode they are
        computed again. One that still prefills begins again in both: the same chunks
        give the same bits.
        """
        assert request.slot is not None
        self.num_preemptions += 1
        grown = self.changes.grown
        self.changes.grown = [entry for entry in grown if entry[0] is not request]
        if request.status is RequestStatus.PREFILLING:
            self.prefilling.remove(request)
            self.admission.give_back(request, for_good=False)
            request.num_prefilled = 0
        else:
            self.num_decoding -= 1
            self._park(request)
        has_output = request.num_dispatched > 0
        request.status = (
            RequestStatus.PREEMPTED if has_output else RequestStatus.WAITING
        )
        self.changes.released.append(request.slot)
        self.running.vacate(request.slot)
        self.admission.queue.add(request)

    def book(
        self, requests: list[Request], slots: list[int], result: StepResult
    ) -> list[Request]:
        """Gives requests the tokens sampled in their slots; some end by them.

        Returns:
          Those that got one: not the ones that ended after the step was scheduled.
        """
        now_s = self._clock()
        token_ids = result.token_ids[slots].tolist()
        codes = result.finish_codes[slots].tolist()
        updated = []
        caches, C = self._caches_output, self._manager.page_size
        for request, slot, token_id, code in zip(
            requests, slots, token_ids, codes, strict=True
        ):
            if not (result.live is None or result.live[slot]):
                continue
            if request.finish_reason is not None:
                continue  # aborted, or ended by a step read after this was scheduled
            if code == FINISH_STUCK:
                request.finish_message = NOTHING_ALLOWED
                self.finish(request, "error")
                self.ended.append(request)
                continue
            request.output_token_ids.append(token_id)
            # The last token is not in the pages yet: the next step writes it.
            written = request.prompt_len + len(request.output_token_ids) - 1
            if caches and written % C == 0:
                self.admission.remember_decoded(request, written)
            if request.first_token_s is None:
                request.first_token_s = now_s
            if request.params.logprobs is not None:
                entries = result.logprobs_at(slot, request.params.logprobs)
                request.output_logprobs.append(entries)
                request.cumulative_logprob += entries[token_id][0]
            if code == FINISH_STOP:
                if token_id in (request.params.stop_token_ids or ()):
                    request.stop_reason = token_id
                self.finish(request, "stop")
            elif code != FINISH_RUNNING:
                assert len(request.output_token_ids) == request.max_tokens
                self.finish(request, "length")
            updated.append(request)
        if self._is_fair:
            for request in updated:
                self.admission.queue.charge(request.tenant, output=1)
        return updated

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request and gives its pages and (not in static) its slot back."""
        status = request.status
        if status is RequestStatus.PREFILLING:
            self.prefilling.remove(request)
        elif status is RequestStatus.DECODING:
            self.num_decoding -= 1
        else:
            self.admission.queue.remove(request)
        del self.requests[request.request_id]
        self.admission.give_back(request, for_good=True)
        self._host.give_back(request.host_pages)
        request.host_pages = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_s = self._clock()
        if status in _RUNNING:
            assert request.slot is not None
            self._leave(request.slot)

    def _leave(self, slot: int) -> None:
        if not self._is_static:
            self.running.vacate(slot)
            return
        self.running.stop_decode(slot)
        if not self.num_running:  # the whole batch is done
            for held in range(len(self.running.holders)):
                self.running.vacate(held)

    def _victim(self, running: list[Request]) -> Request | None:
        host_free = self._host.num_free if self._keeps_pages else None
        return pick_victim(running, host_free=host_free)

    def _park(self, request: Request) -> None:
        if self._keeps_pages:
            request.host_pages = self._host.take(len(request.pages))
            move = PageMove(device=tuple(request.pages), host=tuple(request.host_pages))
            self.changes.saves.append(move)
        else:
            request.fill_len = request.prompt_len + request.num_dispatched
            request.num_prefilled = 0
        self.admission.give_back(request, for_good=False)
