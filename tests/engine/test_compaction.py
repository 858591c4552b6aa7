"""Requests move down only where that saves a decode bucket."""

import pytest

from headrace.engine.compaction import plan_swaps, swaps_to_sources


@pytest.mark.parametrize(
    ("taken", "sizes", "swaps"),
    [
        ([1, 0, 1, 0, 0, 1, 0, 0], (4, 8), [(1, 5)]),
        ([0, 0, 0, 1], (1, 2, 4), [(0, 3)]),
        ([0, 0, 1, 1], (2, 4), [(0, 2), (1, 3)]),
        ([1, 0, 1, 0], (4,), []),
        ([0, 0, 0, 0], (1, 4), []),
        ([1, 1, 1, 0], (1, 4), []),
    ],
)
def test_swaps_fill_the_lowest_holes(taken, sizes, swaps):
    assert plan_swaps([bool(t) for t in taken], sizes) == swaps


def test_swaps_as_sources_are_their_own_inverse():
    sources = swaps_to_sources([(1, 5), (2, 4)], 6)
    assert sources == (0, 5, 4, 3, 2, 1)
    assert [sources[s] for s in sources] == list(range(6))
