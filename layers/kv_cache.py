"""The paged KV cache as a pytree: allocation, sizes, and the write in place.

A cache is a tuple over KV groups (layers with the same K, H and storage type), each one
pair of pools `[L_g, P_g, K, C, H]`, and pools of 8 bits have a float32 scale for each
token and kv head, `[L_g, P_g, K, C]`. Page 0 of a pool is the dummy that padding
writes to. Which request owns which page is the host's business, not this file's.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from headrace.configs.kv_types import KV_8BIT
from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.layers.inputs import KVCache, KVGroup
from headrace.layers.quantized_rows import quantize_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVStorage:
    """How keys and values are stored.

    Attributes:
      dtype: of the pages.
      skip: layers whose pages are of `skip_dtype` instead; not all of them.
      skip_dtype: not of 8 bits.
    """

    dtype: str
    skip: tuple[int, ...] = ()
    skip_dtype: str = "float32"

    @classmethod
    def of(cls, config: EngineConfig) -> "KVStorage":
        """What a resolved config asks for."""
        assert config.kv_dtype and config.param_dtype
        return cls(
            dtype=config.kv_dtype,
            skip=config.kv_dtype_skip,
            skip_dtype=config.param_dtype,
        )


def layer_slots(
    config: ModelConfig, skip: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """Static map: layer -> (KV group, index within the group).

    Args:
      config: the model's shapes.
      skip: the layers of group 1, see `KVStorage`; all others are of group 0.
    """
    counts = [0, 0]
    slots = []
    for layer in range(config.num_layers):
        group = int(layer in skip)
        slots.append((group, counts[group]))
        counts[group] += 1
    return tuple(slots)


def cache_shapes(
    config: ModelConfig, *, num_pages: int, page_size: int, storage: KVStorage
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], ...]:
    """Shapes of the pools, and of the scales of quantized ones, per KV group."""
    heads = num_pages, config.num_kv_heads, page_size, config.head_dim

    def group(layers: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        pool = jax.ShapeDtypeStruct((layers, *heads), jnp.dtype(dtype))
        if dtype not in KV_8BIT:
            return pool, pool
        scales = jax.ShapeDtypeStruct(pool.shape[:-1], jnp.float32)
        return pool, pool, scales, scales

    num_skipped = len(storage.skip)
    groups = [group(config.num_layers - num_skipped, storage.dtype)]
    if num_skipped:
        groups.append(group(num_skipped, storage.skip_dtype))
    return tuple(groups)


def allocate(
    config: ModelConfig, *, num_pages: int, page_size: int, storage: KVStorage
) -> KVCache:
    """Zeroed pools and scales, donated to every step."""
    shapes = cache_shapes(
        config, num_pages=num_pages, page_size=page_size, storage=storage
    )
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def page_bytes(kv_cache: KVCache) -> int:
    """Bytes of one page, keys and values of all layers of all groups."""
    leaves = jax.tree.leaves(kv_cache)
    return sum(leaf.nbytes // leaf.shape[1] for leaf in leaves)


def write_places(
    positions_BT: Int[Array, "B T"],
    query_len_B: Int[Array, " B"],
    page_table_BM: Int[Array, "B M"],
    page_size: int,
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Page id and offset where each token's key and value go.

    Tokens at or beyond `query_len` go to page 0. Example with C = 16: position 18
    of a row with table [7, 4, 0] goes to page 4, offset 2.
    """
    rows, tokens = positions_BT.shape
    index_BT = jnp.clip(positions_BT // page_size, 0, page_table_BM.shape[1] - 1)
    page_BT = jnp.take_along_axis(page_table_BM, index_BT, axis=1)
    valid_BT = jnp.arange(tokens)[None, :] < query_len_B[:, None]
    return jnp.where(valid_BT, page_BT, 0), positions_BT % page_size


def write(
    group: KVGroup,
    layer: int,
    places: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
) -> KVGroup:
    """Writes one layer's keys and values into their pages, in place when donated."""
    page_BT, offset_BT = places
    k_pages, v_pages, *scales = group

    def put(pool: Array, new: Array) -> Array:
        return pool.at[layer, page_BT, :, offset_BT].set(new.astype(pool.dtype))

    if not scales:
        return put(k_pages, k_BTKH), put(v_pages, v_BTKH)
    k_BTKH, k_scales_BTK = _quantized(k_BTKH, k_pages.dtype.name)
    v_BTKH, v_scales_BTK = _quantized(v_BTKH, v_pages.dtype.name)
    return (
        put(k_pages, k_BTKH),
        put(v_pages, v_BTKH),
        put(scales[0], k_scales_BTK),
        put(scales[1], v_scales_BTK),
    )


def scales_of(group: KVGroup) -> tuple[Array, Array] | None:
    """Of keys and values, where the pools have 8 bits."""
    return (group[2], group[3]) if len(group) == 4 else None


def _quantized(
    x_BTKH: Float[Array, "B T K H"], dtype: str
) -> tuple[Num[Array, "B T K H"], Float[Array, "B T K"]]:
    """Each token's head by its own largest value, so it depends on nothing else."""
    values_RH, scales_R1 = quantize_rows(
        x_BTKH.reshape(-1, x_BTKH.shape[-1]),
        dtype,  # type: ignore[arg-type]
    )
    return values_RH.reshape(x_BTKH.shape), scales_R1.reshape(x_BTKH.shape[:-1])
