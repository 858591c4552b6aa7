"""Prompts on their way into pages, in order, and the siblings that wait for them.

With `n` > 1 a prompt has several completions. The first of them, the *leader*, fills
the prompt; the others *follow*: they hold slots and share the leader's full pages, and
when its last chunk runs, its logits serve them all. Part of the scheduler. No jax.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from headrace.configs.schema import EngineConfig
from headrace.engine.packed_layout import num_packed_rows
from headrace.engine.request import Request, RequestStatus
from headrace.engine.schedule import pick_prefill_shape


class PrefillLine:
    """Requests whose prompts are not filled yet.

    Args:
      config: resolved.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.prefill_shapes is not None
        self._shapes = config.prefill_shapes
        self._max_chunk = max(tokens for _, tokens in self._shapes)
        self._max_rows = num_packed_rows(config)
        self._is_static = config.policy == "static"
        self._budget = config.max_tokens_per_step
        self._page_size = config.page_size
        self._requests: deque[Request] = deque()
        self._is_fair = config.policy == "fair"
        self._num_chunks = 0
        self._last_chunk: dict[str | None, int] = {}  # by tenant

    def __len__(self) -> int:
        """Requests in the line, followers included."""
        return sum(1 + len(request.followers) for request in self._requests)

    def add(self, request: Request) -> None:
        """The request fills its own prompt, after those before it."""
        self._requests.append(request)

    def can_follow(self, request: Request, coming: Mapping[Request, bool]) -> bool:
        """Whether its leader fills their prompt now and can take one more along.

        Args:
          request: waits.
          coming: requests that are about to join the line, and whether they follow.
        """
        leader = request.leader
        if leader is None or request.status is not RequestStatus.WAITING:
            return False
        if self._is_static or leader.fill_len > leader.prompt_len:
            return False
        # One that comes back after a preemption has its prompt filled already.
        is_coming = leader in coming and leader.status is RequestStatus.WAITING
        if not is_coming and leader not in self._requests:
            return False
        # All of them come in the step of the last chunk, each with a row of its own.
        also = sum(f and other.leader is leader for other, f in coming.items())
        return 1 + len(leader.followers) + also < self._max_rows

    def follow(self, request: Request) -> None:
        """The request takes its logits from its leader's last chunk."""
        assert request.leader is not None
        request.leader.followers.append(request)

    def remove(self, request: Request) -> None:
        """Takes out a request; if it was a leader, its first follower goes on."""
        leader = request.leader
        if leader is not None and request in leader.followers:
            leader.followers.remove(request)
            return
        place = self._requests.index(request)
        del self._requests[place]
        if not request.followers:
            return
        heir, *others = request.followers
        request.followers, heir.followers = [], others
        for other in others:
            other.leader = heir
        heir.leader = None
        # The shared pages hold what was filled so far; the heir's last page does not.
        shared = heir.prompt_len // self._page_size * self._page_size
        done = min(request.num_prefilled, shared, heir.prompt_len - 1)
        heir.num_prefilled = done // self._page_size * self._page_size
        self._requests.insert(place, heir)

    def pick(self, *, num_decoding: int, num_resumed: int) -> list[tuple[Request, int]]:
        """Next chunks for one prefill call: (request, length).

        Takes requests in turn while one bucket holds all their chunks, and stops at
        the first that does not fit: a later one never overtakes it.

        Args:
          num_decoding: tokens of the step's budget that decoding takes.
          num_resumed: rows of the step that are taken by requests that come back.
        """
        chunks: list[tuple[Request, int]] = []
        longest = total = 0
        budget = None if self._budget is None else self._budget - num_decoding
        spare_rows = self._max_rows - num_resumed
        for request in self._in_turn():
            left = request.fill_len - request.num_prefilled
            length = min(left, self._max_chunk)
            longest = max(longest, length)
            total += length
            spare_rows -= 1 + (len(request.followers) if length == left else 0)
            if chunks and budget is not None and total > budget:
                break
            if spare_rows < 0 or not pick_prefill_shape(
                self._shapes, rows=len(chunks) + 1, tokens=longest
            ):
                break
            chunks.append((request, length))
        return chunks

    def _in_turn(self) -> Iterable[Request]:
        """First come first; under "fair" a prompt of each tenant in turn.

        Whose last chunk is longest ago is next. So the prompts of a tenant that floods
        delay another's by a chunk, and nobody's wait for ever.
        """
        if not self._is_fair:
            return self._requests
        counts: Counter[str | None] = Counter()
        keys: dict[Request, tuple[int, int]] = {}
        for request in self._requests:
            last = self._last_chunk.get(request.tenant, 0)
            keys[request] = (counts[request.tenant], last)
            counts[request.tenant] += 1
        return sorted(keys, key=lambda request: keys[request])

    def advance(self, request: Request, length: int) -> tuple[int, list[Request]]:
        """Counts a chunk as done.

        Returns:
          Where the chunk starts, and after the last one the followers it serves.
        """
        self._num_chunks += 1
        self._last_chunk[request.tenant] = self._num_chunks
        start = request.num_prefilled
        request.num_prefilled += length
        if request.num_prefilled < request.fill_len:
            return start, []
        self._requests.remove(request)
        served, request.followers = request.followers, []
        for follower in served:
            follower.num_prefilled = follower.fill_len
        return start, served
