"""Paged attention by Mosaic kernels: few query tokens by one, chunks by another."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.paged_attention import tuning
from headrace.pallas_kernels.paged_attention.mosaic_gpu_decode import (
    paged_decode_mosaic,
)
from headrace.pallas_kernels.paged_attention.mosaic_gpu_merge import merge_splits
from headrace.pallas_kernels.paged_attention.mosaic_gpu_prefill import (
    paged_prefill_mosaic,
)
from headrace.pallas_kernels.paged_attention.mosaic_gpu_tiles import earliest_key
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
    Pools,
)


def paged_attention_mosaic(
    q_BTKGH: Float[Array, "B T K G H"],
    pools: Pools,
    layer: int | Array,
    arrays: AttentionArrays,
    options: AttentionOptions,
    *,
    interpret: Any = None,
) -> Float[Array, "B T K G H"]:
    """See `api.paged_attention`, whose arguments these are, already checked.

    Raises:
      NotImplementedError: not served; see `tuning.refusal`.
    """
    reason = tuning.refusal(q_BTKGH, pools, arrays, options, tuning.CAPABILITY)
    if reason is not None:
        raise NotImplementedError(f"no kernel for {reason}")
    _, T, _, G, H = q_BTKGH.shape
    is_decode = tuning.is_decode(
        T, G, H,
        is_narrow=pools[0].dtype.itemsize == 1,
        has_cap=options.soft_cap is not None,
    )  # fmt: skip
    serve = _decode if is_decode else paged_prefill_mosaic
    return serve(q_BTKGH, pools, layer, arrays, options, interpret=interpret)


def _decode(
    q_BTKGH: Array,
    pools: Pools,
    layer: int | Array,
    arrays: AttentionArrays,
    options: AttentionOptions,
    *,
    interpret: Any,
) -> Float[Array, "B T K G H"]:
    _, T, _, G, H = q_BTKGH.shape
    sizes = tuning.decode_tuning(H)
    table_BM, P = arrays.page_table_BM, pools[0].shape[1]
    is_held_BM = (table_BM >= 0) & (table_BM < P)
    arrays = arrays._replace(page_table_BM=jnp.where(is_held_BM, table_BM, 0))
    partial = paged_decode_mosaic(
        q_BTKGH, pools, layer, arrays, options, tuning=sizes, interpret=interpret
    )
    sinks_KN = arrays.sinks_KG
    if sinks_KN is not None:
        sinks_KN = jnp.tile(sinks_KN, (1, T))
        sinks_KN = jnp.pad(sinks_KN, ((0, 0), (0, partial[1].shape[-1] - T * G)))
    live_B2 = live_splits(arrays, options, sizes.split)
    return merge_splits(
        partial, live_B2, sinks_KN, num_tokens=T, group=G, interpret=interpret
    )


def live_splits(
    arrays: AttentionArrays, options: AttentionOptions, split: int
) -> Int[Array, "B 2"]:
    """First split with keys that a row sees, and one past the last."""
    end_B = -(-arrays.context_len_B // split)
    first_B = jnp.zeros_like(end_B)
    if options.window is not None:
        start_B, context_len_B = arrays.positions_BT[:, 0], arrays.context_len_B
        first_B = earliest_key(start_B, context_len_B, options.window) // split
    return jnp.stack([first_B, end_B], axis=1).astype(jnp.int32)
