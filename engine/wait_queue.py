"""The order in which requests get slots: who waits, and who comes next. No jax.

Three orders, each without a step in which all are compared anew:

fcfs      by arrival.
priority  lower first. One unit of priority is worth `ageing_s` seconds of waiting, so
          the order of two requests never changes, and nobody waits for those that
          come more than `ageing_s` times the difference later.
fair      the tenant that was served least, then its first request (Sheng et al., OSDI
          2024, algorithm 2: the virtual token counter; a tenant that comes back does
          not keep credit from its absence).
"""

import bisect
from collections.abc import Iterator

from headrace.engine.request import Request

# Output tokens cost more of the device than prompt tokens (Sheng et al., section 5).
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
# Less than a token: who comes back is next, not level with whom it is lifted to, who
# may fill prompts for many steps before it is charged again.
_HEAD_START = 0.5


class WaitQueue:
    """Requests without a slot, preempted ones included.

    Args:
      policy: "fcfs", "static" (the same order), "priority" or "fair".
      ageing_s: seconds of waiting that outweigh one unit of priority.
    """

    def __init__(self, policy: str, ageing_s: float) -> None:
        self._by_priority = policy == "priority"
        self._is_fair = policy == "fair"
        self._ageing_s = ageing_s
        self._lines: dict[str | None, list[tuple[float, int, Request]]] = {}
        self._served: dict[str | None, float] = {}
        self._length = 0
        self.num_tokens = 0
        # Requests and prompt tokens of each tenant that has some.
        self._waiting: dict[str | None, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Waiting requests."""
        return self._length

    def add(self, request: Request) -> None:
        """Puts a request at the place that its key gives it."""
        tenant = self._tenant(request)
        line = self._lines.setdefault(tenant, [])
        bisect.insort(line, self._entry(request))
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Takes out a request that waits."""
        tenant = self._tenant(request)
        line = self._lines[tenant]
        place = bisect.bisect_left(line, self._entry(request))
        assert line[place][2] is request
        del line[place]
        if not line:
            del self._lines[tenant]
        self._count(request, -1)

    def waiting_of(self, tenant: str | None) -> tuple[int, int]:
        """A tenant's requests and their prompt tokens, whatever the policy."""
        return self._waiting.get(tenant, (0, 0))

    def candidates(self) -> Iterator[Request]:
        """All that wait, in the order in which they should get slots.

        In the order "fair" each tenant's counter moves on with its requests, as if
        they were admitted one by one. The queue must not change meanwhile.
        """
        if not self._is_fair:
            for _, _, request in self._lines.get(None, ()):
                yield request
            return
        served = {tenant: self.served(tenant) for tenant in self._lines}
        places = dict.fromkeys(self._lines, 0)
        while served:
            tenant = min(served, key=lambda t: (served[t], self._lines[t][places[t]]))
            request = self._lines[tenant][places[tenant]][2]
            yield request
            served[tenant] += PROMPT_WEIGHT * request.prompt_len
            places[tenant] += 1
            if places[tenant] == len(self._lines[tenant]):
                del served[tenant]

    def come_back(self, tenant: str | None, active: set[str | None]) -> None:
        """Lifts a tenant that had nothing to do to the least served active one."""
        if not self._is_fair or tenant in active or tenant in self._lines:
            return
        others = active | set(self._lines)
        least = min((self.served(other) for other in others), default=0.0)
        self._served[tenant] = max(self.served(tenant), least - _HEAD_START)

    def charge(self, tenant: str | None, *, prompt: int = 0, output: int = 0) -> None:
        """Counts tokens that a tenant was served."""
        if self._is_fair:
            cost = PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output
            self._served[tenant] = self.served(tenant) + cost

    def served(self, tenant: str | None) -> float:
        """The tenant's virtual token counter."""
        return self._served.get(tenant, 0.0)

    def _count(self, request: Request, sign: int) -> None:
        self._length += sign
        self.num_tokens += sign * request.prompt_len
        count, tokens = self.waiting_of(request.tenant)
        self._waiting[request.tenant] = (
            count + sign,
            tokens + sign * request.prompt_len,
        )
        if not self._waiting[request.tenant][0]:
            del self._waiting[request.tenant]

    def _tenant(self, request: Request) -> str | None:
        return request.tenant if self._is_fair else None

    def _entry(self, request: Request) -> tuple[float, int, Request]:
        key = 0.0
        if self._by_priority:
            key = request.arrival_s + request.priority * self._ageing_s
        return (key, request.number, request)
