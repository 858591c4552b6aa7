"""Pages are never lost, never given twice, and page 0 never at all."""

import hypothesis
import pytest
from hypothesis import strategies as st

from headrace.engine.kv_cache_manager import KVCacheManager


def test_all_pages_but_the_dummy_can_be_taken_lowest_first():
    manager = KVCacheManager(5, 16)
    assert manager.num_free == 4
    assert manager.allocate(4) == [1, 2, 3, 4]
    assert manager.num_free == 0


def test_request_for_more_than_is_free_takes_nothing():
    manager = KVCacheManager(5, 16)
    manager.allocate(2)
    assert manager.allocate(3) is None
    assert manager.num_free == 2


def test_no_pages_wanted_is_not_a_refusal():
    assert KVCacheManager(2, 16).allocate(0) == []


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for_rounds_up(tokens, pages):
    assert KVCacheManager(5, 16).pages_for(tokens) == pages


@pytest.mark.parametrize("pages", [[0], [5], [-1], [1, 1], [2]])
def test_freeing_what_is_not_in_use_fails(pages):
    manager = KVCacheManager(5, 16)
    manager.allocate(1)
    with pytest.raises(AssertionError):
        manager.free(pages)


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (5, 0)])
def test_sizes_below_their_range_are_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="must be at least"):
        KVCacheManager(num_pages, page_size)


@hypothesis.given(
    st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)))
)
def test_free_plus_used_is_the_pool_after_any_sequence(num_pages, actions):
    manager = KVCacheManager(num_pages, 16)
    held: list[list[int]] = []
    for does_allocate, amount in actions:
        if does_allocate:
            could = amount <= manager.num_free
            pages = manager.allocate(amount)
            assert (pages is not None) == could
            if pages is not None:
                assert len(pages) == amount
                held.append(pages)
        elif held:
            manager.free(held.pop(amount % len(held)))
        used = [page for pages in held for page in pages]
        assert len(used) == len(set(used)) and 0 not in used
        assert manager.num_free + len(used) == num_pages - 1
    for pages in held:
        manager.free(pages)
    assert sorted(manager.allocate(num_pages - 1)) == list(range(1, num_pages))
