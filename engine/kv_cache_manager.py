"""Hands out the pages of the KV pool and takes them back.

Counts page ids on the host; knows neither requests nor arrays. Page 0 is the dummy
that padding writes to: it is never handed out.
"""

from collections.abc import Sequence


class KVCacheManager:
    """Free list over pages [1, num_pages).

    NOTE: free + used == num_pages - 1 at all times, and no page is used twice.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Starts with every page free.

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
        # A stack: the page freed last is handed out first. Low pages come first.
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_used = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_wanted: int) -> list[int] | None:
        """Takes `num_wanted` pages, or none at all (None) if fewer are free."""
        assert num_wanted >= 0
        if num_wanted > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_wanted)]
        for page in pages:
            assert not self._is_used[page], f"page {page} is handed out twice"
            self._is_used[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; each must be in use."""
        for page in pages:
            assert 0 < page < self.num_pages, f"page {page} is none of the pool's"
            assert self._is_used[page], f"page {page} is freed twice"
            self._is_used[page] = 0
            self._free.append(page)
        assert len(self._free) < self.num_pages
