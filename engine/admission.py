"""Who may come in: queue bounds, queue order, time limits, and pages to begin with.

Part of the scheduler, which alone calls it. No jax, no arrays.
"""

import heapq
from collections.abc import Iterator

from headrace.configs.schema import EngineConfig
from headrace.engine.kv_cache_manager import KVCacheManager
from headrace.engine.prefix_hash import PageName, name_pages
from headrace.engine.request import Request, RequestStatus
from headrace.engine.wait_queue import WaitQueue


class QueueFullError(RuntimeError):
    """The queue's bound is reached: the request was not taken; try again later."""


class Admission:
    """The queue, and the pages of those that leave it.

    Args:
      config: resolved.
      manager: the pool's pages.
      num_host_pages: room for the pages of preempted requests.
    """

    def __init__(
        self, config: EngineConfig, manager: KVCacheManager, num_host_pages: int
    ) -> None:
        assert config.prefill_shapes is not None
        self.queue = WaitQueue(config.policy, config.ageing_s)
        self._config = config
        self._manager = manager
        # The host pool must be able to take any one victim, however full all is.
        longest = manager.pages_for(config.max_context_len or 0)
        self._room = manager.num_pages - 1 + max(0, num_host_pages - longest)
        self._keeps_pages = config.numerics == "invariant"
        # Most pages that each admitted request can come to hold.
        self._promises: dict[int, int] = {}
        self._promised = 0
        # Names of pages that admitted requests will fill in later steps.
        self._coming: dict[PageName, str] = {}
        self._time_limits: list[tuple[float, int, bool, Request]] = []

    def check_room(self, tenant: str | None, count: int, num_tokens: int) -> None:
        """Whether the queue takes so many requests and prompt tokens more of a tenant.

        Source: of `share_queue`, Choudhury and Hahne, 1998, "Dynamic queue length
        thresholds for shared-memory packet switches", with alpha = 1.

        Raises:
          QueueFullError: one of the queue's bounds is reached.
          ValueError: an empty queue would not take them either.
        """
        config, queue = self._config, self.queue
        own_count, own_tokens = queue.waiting_of(tenant)
        for name, waiting, own, more in (
            ("max_queued_requests", len(queue), own_count, count),
            ("max_queued_tokens", queue.num_tokens, own_tokens, num_tokens),
        ):
            limit = getattr(config, name)
            if limit is None:
                continue
            if more > limit:
                raise ValueError(
                    f"a request with its completions must fit the queue, whose {name} "
                    f"is {limit}, got {more}"
                )
            have, room = waiting + more, limit - waiting
            if more > room:
                raise QueueFullError(
                    f"the queue is full: {name} is {limit}, and this request would "
                    f"make it {have}; try again later"
                )
            if config.share_queue and own and own + more > room - more:
                raise QueueFullError(
                    f"the queue is full for this tenant: of {name} {limit} it has "
                    f"{own}, {room} are left, and more than is left it may not have; "
                    f"try again later"
                )

    def add(self, request: Request) -> None:
        """Puts a new request into the queue; `check_room` was asked."""
        self.queue.add(request)
        for at_s, is_queue in (
            (request.deadline_s, False),
            (request.queue_deadline_s, True),
        ):
            if at_s is not None:
                entry = (at_s, request.number, is_queue, request)
                heapq.heappush(self._time_limits, entry)

    def overdue(self, now_s: float) -> Iterator[tuple[Request, bool]]:
        """Requests whose time is over, and whether it was their time in the queue."""
        limits = self._time_limits
        while limits and limits[0][0] <= now_s:
            _, _, is_queue, request = heapq.heappop(limits)
            if request.is_finished or (is_queue and request.admitted_s is not None):
                continue
            yield request, is_queue

    def should_wait(self, now_s: float, num_free_slots: int) -> bool:
        """Whether an idle engine waits for more prompts, `max_queue_delay_s` long."""
        delay = self._config.max_queue_delay_s
        if not delay or len(self.queue) >= num_free_slots:
            return False
        first_s = min(request.arrival_s for request in self.queue.candidates())
        return now_s < first_s + delay

    def take_pages(self, request: Request, *, follows: bool) -> bool | None:
        """Gives a request at the queue's head the pages to begin or go on with.

        Args:
          request: in the queue.
          follows: it shares its leader's full pages, which are being filled.

        Returns:
          True: it has them. False: too few are free. None: it should wait for a page
          that another request is about to fill.
        """
        limit = request.max_len
        promise = self._manager.pages_for(limit)
        if self._config.policy == "static":
            pages = self._manager.allocate(promise)
            request.pages = pages or []
            return pages is not None
        is_new = request.status is RequestStatus.WAITING
        if is_new and self._keeps_pages and self._promised + promise > self._room:
            return False
        if request.host_pages:
            # Its next tokens must fit as well: the row decodes in the same step.
            end = request.num_computed + 1 + self._config.drafts_per_pass
            wanted = self._manager.pages_for(min(end, limit))
            pages = self._manager.allocate(max(wanted, len(request.host_pages)))
            request.pages = pages or []
            return pages is not None
        if follows:
            return self._take_to_follow(request, promise)
        return self._take_with_cache(request, promise)

    def _take_to_follow(self, request: Request, promise: int) -> bool:
        """The leader's full pages, and one of its own for the rest of the prompt."""
        assert request.leader is not None
        full, rest = divmod(request.prompt_len, self._manager.page_size)
        own = self._manager.allocate(int(rest > 0))
        if own is None:
            return False
        shared = request.leader.pages[:full]
        self._manager.share(shared)
        request.pages = [*shared, *own]
        self._promise(request, promise)
        return True

    def _promise(self, request: Request, num_pages: int) -> None:
        if self._keeps_pages:
            self._promises[request.number] = num_pages
            self._promised += num_pages

    def _take_with_cache(self, request: Request, promise: int) -> bool | None:
        manager, C = self._manager, self._manager.page_size
        names = self._usable_names(request)
        hits = manager.find(names)
        if len(hits) < len(names) and names[len(hits)] in self._coming:
            return None
        manager.share(hits)
        wanted = manager.pages_for(request.fill_len) - len(hits)
        pages = manager.allocate(wanted)
        if pages is None:
            manager.free(hits)
            return False
        request.pages = [*hits, *pages]
        request.num_prefilled = len(hits) * C
        for name in names[len(hits) :]:
            self._coming.setdefault(name, request.request_id)
        if request.admitted_s is None:
            request.num_cached = len(hits) * C
            if request.uses_cache:
                manager.stats.query_tokens += request.prompt_len
                manager.stats.hit_tokens += request.num_cached
        self._promise(request, promise)
        return True

    def _usable_names(self, request: Request) -> tuple[PageName, ...]:
        """Names to look up: the last token is always computed, for its logits."""
        # A prompt that is scored has to be computed as a whole.
        if not request.uses_cache or request.params.prompt_logprobs is not None:
            return ()
        full = (request.fill_len - 1) // self._manager.page_size
        return request.page_names[:full]

    def remember_filled(self, request: Request, start: int, end: int) -> None:
        """Names the pages that a chunk [start, end) has filled."""
        if not request.uses_cache:
            return
        C = self._manager.page_size
        for index in range(start // C, min(end // C, len(request.page_names))):
            name = request.page_names[index]
            self._manager.remember(request.pages[index], name)
            if self._coming.get(name) == request.request_id:
                del self._coming[name]

    def remember_decoded(self, request: Request, written: int) -> None:
        """Names the page that ends with token `written`, a multiple of its size."""
        C, index = self._manager.page_size, len(request.page_names)
        if not request.uses_cache or index == written // C:
            return  # index: the prompt's own last page
        before = request.page_names[-1] if index else request.name_seed
        tokens = request.tokens(index * C, written)
        request.page_names += name_pages(before, tokens, C)
        if index < len(request.pages):  # it may have been preempted since
            self._manager.remember(request.pages[index], request.page_names[index])

    def give_back(self, request: Request, *, for_good: bool) -> None:
        """Frees a request's pages; `for_good` when it will not come back for more."""
        if request.status is RequestStatus.PREFILLING:
            for name in request.page_names:
                if self._coming.get(name) == request.request_id:
                    del self._coming[name]
        self._manager.free(request.pages)
        request.pages = []
        if for_good or request.status is RequestStatus.PREFILLING:
            self._promised -= self._promises.pop(request.number, 0)


def can_go_on(request: Request, spare_rows: int) -> bool:
    """Whether what a preempted request needs besides pages is at hand."""
    if request.status is not RequestStatus.PREEMPTED:
        return True
    if len(request.output_token_ids) < request.num_dispatched:
        return False  # its last token is still on the device
    return spare_rows > 0 or not request.host_pages
