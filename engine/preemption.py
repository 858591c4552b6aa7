"""Which running request gives way, and where its pages wait. No jax, no arrays."""

from collections.abc import Iterable

from headrace.engine.request import Request, RequestStatus


class HostPool:
    """Free list over places for pages in host memory.

    Args:
      num_pages: places; 0 keeps nothing.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Places that hold nothing."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes `count` places; there must be as many."""
        assert count <= len(self._free), "admission promised too much"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, places: Iterable[int]) -> None:
        """Frees places."""
        self._free += places


def pick_victim(running: Iterable[Request], *, host_free: int | None) -> Request | None:
    """The request to preempt: the lowest priority first, then the latest.

    Args:
      running: requests with pages.
      host_free: places in the host pool; None where nothing has to be kept.
    """
    fitting = [
        request
        for request in running
        if host_free is None
        or request.status is RequestStatus.PREFILLING
        or len(request.pages) <= host_free
    ]
    return max(fitting, key=lambda r: (r.priority, r.number), default=None)
