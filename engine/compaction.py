"""Moves requests to lower slots when a smaller decode bucket could hold them all.

Pure functions over slot numbers. A decode bucket of B covers slots 0..B-1, so one
request in a high slot keeps a large bucket busy.

    taken slots   0 . 2 . . 5 . .    buckets 4, 8: three requests, but bucket 8
    swap 5 and 1  0 1 2 . . . . .    now bucket 4
"""

from collections.abc import Sequence


def plan_swaps(
    is_taken: Sequence[bool], decode_batch_sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Which slots to swap so that the smallest bucket covers all taken slots.

    Args:
      is_taken: per slot, whether a request holds it.
      decode_batch_sizes: ascending; the last is the number of slots.

    Returns:
      (free slot, taken slot) pairs, no slot twice; empty where no bucket is saved.
    """
    taken = [slot for slot, is_used in enumerate(is_taken) if is_used]
    if not taken:
        return []
    target = next(size for size in decode_batch_sizes if size >= len(taken))
    movers = [slot for slot in taken if slot >= target]
    if not movers:
        return []
    holes = (slot for slot in range(target) if not is_taken[slot])
    return list(zip(holes, movers, strict=False))


def swaps_to_sources(
    swaps: Sequence[tuple[int, int]], num_slots: int
) -> tuple[int, ...]:
    """The permutation that the swaps make: new slot i takes old slot sources[i]."""
    sources = list(range(num_slots))
    for low, high in swaps:
        sources[low], sources[high] = high, low
    return tuple(sources)
