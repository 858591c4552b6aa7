"""Hands out the pages of the KV pool, shares them, remembers what full ones hold.

Counts page ids on the host; knows neither requests nor arrays. A page is *used* while
somebody holds it, else *free*. A free page may still be *cached*: it keeps its name
(see prefix_hash) until it is handed out again, least recently used first. Page 0 is
the dummy that padding writes to: it is never handed out.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from headrace.engine.prefix_hash import PageName


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counts since start.

    Attributes:
      query_tokens: prompt tokens of admitted requests that use the cache.
      hit_tokens: those whose pages were there.
      evictions: cached pages whose name was lost to make room.
    """

    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0


class KVCacheManager:
    """Reference-counted pages [1, num_pages), with a cache of full ones.

    NOTE: free + used == num_pages - 1 at all times; a page with several holders was
    shared with `share`, never handed out twice.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Starts with every page free and nothing cached.

        Args:
          num_pages: pages in the pool, dummy page 0 included; at least 2.
          page_size: tokens per page; at least 1.

        Raises:
          ValueError: an argument is below its range.
        """
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2, got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.stats = CacheStats()
        # A stack: the page freed last is handed out first. Low pages come first.
        self._blank = list(range(num_pages - 1, 0, -1))
        # Free pages with a name, least recently used first (a dict keeps order).
        self._idle: dict[int, None] = {}
        self._holders = [0] * num_pages
        self._name_of: dict[int, PageName] = {}
        self._page_of: dict[PageName, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be handed out, cached ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds, shared ones counted once."""
        return self.num_pages - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Pages with a name, used or free."""
        return len(self._name_of)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_wanted: int) -> list[int] | None:
        """Takes `num_wanted` blank pages, or none at all (None) if fewer are free.

        Cached pages are given up where blank ones do not suffice.
        """
        assert num_wanted >= 0
        if num_wanted > self.num_free:
            return None
        while len(self._blank) < num_wanted:
            self._evict()
        pages = [self._blank.pop() for _ in range(num_wanted)]
        for page in pages:
            assert not self._holders[page], f"page {page} is handed out twice"
            self._holders[page] = 1
        return pages

    def find(self, names: Iterable[PageName]) -> list[int]:
        """Pages of the longest run of cached names; nobody holds them more by this."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for each; they are cached or in use."""
        for page in pages:
            if not self._holders[page]:
                del self._idle[page]
            self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        """Whether it has several holders; writing to it would change their tokens."""
        return self._holders[page] > 1

    def free(self, pages: Sequence[int]) -> None:
        """One holder less for each, which must be in use.

        Without holders a cached page stays findable; the later pages of a prefix are
        given up before the earlier ones, which more requests can use.
        """
        for page in reversed(pages):
            assert 0 < page < self.num_pages, f"page {page} is none of the pool's"
            assert self._holders[page], f"page {page} is freed twice"
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._name_of:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def remember(self, page: int, name: PageName) -> None:
        """Names a full page in use; if another page has the name, that one stays.

        The page's content must be on its way to the device before any later step
        reads it.
        """
        assert self._holders[page], f"page {page} is not in use"
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def forget_all(self) -> None:
        """Drops every name, as after new weights."""
        self._blank += reversed(self._idle)
        self._idle.clear()
        self._name_of.clear()
        self._page_of.clear()

    def _evict(self) -> None:
        """Makes the least recently used cached page blank."""
        page = next(iter(self._idle))
        del self._idle[page]
        del self._page_of[self._name_of.pop(page)]
        self._blank.append(page)
        self.stats.evictions += 1
