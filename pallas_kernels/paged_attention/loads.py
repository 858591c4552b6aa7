"""What the Mosaic kernels load of a row's pages, in plain arithmetic. No jax.

Tests hold it against the copies that interpreted kernels make
(`compat.counted_copies`); the compile gate multiplies it by a key's bytes, since the
text of a program shows the pool alone.
"""

from headrace.pallas_kernels.paged_attention import tuning

# Queries of one warpgroup of the chunk kernel, and its warpgroups.
_QUERIES, _CONSUMERS = 64, 2


def loaded_keys(
    num_tokens: int,
    group: int,
    head_dim: int,
    context_len: int,
    *,
    window: int | None = None,
    is_narrow: bool = False,
    has_cap: bool = False,
) -> int:
    """Keys of one kv head that a call loads for one row, and as many values.

    The decode kernel loads each live tile once. The chunk kernel loads them for each
    pair of 64 queries of a head, so most of its loads find the L2.

    Args:
      num_tokens: query tokens, the last of the context.
      group: query heads per kv head.
      head_dim: their size.
      context_len: keys that the row holds.
      window: keys that a query sees.
      is_narrow: pools have 8 bits.
      has_cap: scores have a soft cap.
    """
    start = max(context_len - num_tokens, 0)
    if tuning.is_decode(
        num_tokens, group, head_dim, is_narrow=is_narrow, has_cap=has_cap
    ):
        return _keys(start, context_len, tuning.TILE, window)
    size = tuning.prefill_tuning(head_dim).keys
    units = -(-num_tokens // _QUERIES) * group
    total = 0
    for pair in range(-(-units // _CONSUMERS)):
        first, last = (
            start + min(unit // group, units // group - 1) * _QUERIES
            for unit in (pair * _CONSUMERS, pair * _CONSUMERS + 1)
        )
        if first < context_len:
            end = min(last + _QUERIES, context_len)
            total += _keys(first, end, size, window)
    return total


def _keys(first_query: int, end: int, tile: int, window: int | None) -> int:
    """Keys of the tiles from the first that a query sees to the one before `end`."""
    earliest = 0 if window is None else max(first_query - window + 1, 0)
    return (-(-end // tile) - earliest // tile) * tile if end else 0
