"""Moves pages within the pool, and between it and host memory, bit for bit.

Pure programs of a fixed number of pages, compiled at start like all others, and the
host memory itself, which is allocated at start.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from headrace.engine.schedule import PageMove
from headrace.layers.inputs import KVCache

# Pages of one call: a move of fewer is padded with the dummy page.
PAGES_PER_MOVE = 8


def save_pages(kv_cache: KVCache, page_J: Int[Array, " J"]) -> KVCache:
    """The content of J pages, each pool as [L, J, K, C, H]."""
    return jax.tree.map(lambda pool: pool[:, page_J], kv_cache)


def load_pages(kv_cache: KVCache, page_J: Int[Array, " J"], data: KVCache) -> KVCache:
    """The cache (donated) with J pages replaced; page 0 may hold anything."""
    return jax.tree.map(
        lambda pool, pages: pool.at[:, page_J].set(pages), kv_cache, data
    )


def copy_pages(
    kv_cache: KVCache, source_J: Int[Array, " J"], target_J: Int[Array, " J"]
) -> KVCache:
    """The cache (donated) with J pages copied onto others; 0 onto 0 is padding."""
    return jax.tree.map(
        lambda pool: pool.at[:, target_J].set(pool[:, source_J]), kv_cache
    )


class HostPages:
    """Room in host memory for the pages of preempted requests.

    Args:
      kv_cache: gives the pools' shapes.
      num_pages: places.
    """

    def __init__(self, kv_cache: KVCache, num_pages: int) -> None:
        self.num_pages = num_pages
        self._pools = jax.tree.map(
            lambda pool: np.zeros(
                (pool.shape[0], num_pages, *pool.shape[2:]), pool.dtype
            ),
            kv_cache,
        )

    def put(self, places: tuple[int, ...], data: KVCache) -> None:
        """Stores the first len(places) pages of a move."""

        def store(host: np.ndarray, pages: np.ndarray) -> None:
            host[:, list(places)] = pages[:, : len(places)]

        jax.tree.map(store, self._pools, data)

    def get(self, places: tuple[int, ...]) -> KVCache:
        """Pages of one move, padded with zeros; new arrays."""
        spare = PAGES_PER_MOVE - len(places)

        def load(host: np.ndarray) -> np.ndarray:
            pad = [(0, 0), (0, spare), *((0, 0),) * (host.ndim - 2)]
            return np.pad(host[:, list(places)], pad)

        return jax.tree.map(load, self._pools)


def pieces(move: PageMove) -> list[PageMove]:
    """The move in calls of at most PAGES_PER_MOVE pages."""
    pairs = zip(cut(move.device), cut(move.host), strict=True)
    return [PageMove(device=device, host=host) for device, host in pairs]


def cut[T](pages: tuple[T, ...]) -> list[tuple[T, ...]]:
    """Anything per page, in the pieces that one call takes."""
    starts = range(0, len(pages), PAGES_PER_MOVE)
    return [pages[start : start + PAGES_PER_MOVE] for start in starts]


def padded_ids(pages: tuple[int, ...]) -> np.ndarray:
    """[J] int32 page ids, then zeros."""
    ids = np.zeros(PAGES_PER_MOVE, np.int32)
    ids[: len(pages)] = pages
    return ids


def move_example(kv_cache: KVCache) -> tuple[jax.ShapeDtypeStruct, KVCache]:
    """Shapes of a move's page ids and content."""
    ids = jax.ShapeDtypeStruct((PAGES_PER_MOVE,), jnp.int32)
    return ids, jax.eval_shape(save_pages, kv_cache, ids)
