"""Cases of paged attention: ragged rows, shuffled pages, NaN where unused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
)
from headrace.pallas_kernels.paged_attention.reference import (
    paged_attention_reference,
)

LAYER = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `api.paged_attention`, as numpy arrays."""

    q_BTKGH: np.ndarray
    pools: tuple[np.ndarray, np.ndarray]
    arrays: AttentionArrays
    options: AttentionOptions

    def truth(self):
        """float32, from the very numbers that the kernel sees."""
        return paged_attention_reference(
            self.q_BTKGH, self.pools, LAYER, self.arrays, self.options
        )

    def rows(self, rows):
        """The same pools with some rows."""
        per_row = ("page_table_BM", "positions_BT", "context_len_B", "tree_mask_BT")
        changes = {
            name: getattr(self.arrays, name)[rows]
            for name in per_row
            if getattr(self.arrays, name) is not None
        }
        arrays = self.arrays._replace(**changes)
        return dataclasses.replace(self, q_BTKGH=self.q_BTKGH[rows], arrays=arrays)


def make_case(
    context_lens, *, T=1, K=1, G=4, H=64, C=16, M=8, seed=0, dtype=None,
    window=None, soft_cap=None, scale=None, has_sinks=False, has_tree=False,
):  # fmt: skip
    """Rows whose T queries are the last tokens of their context.

    Pages are out of order, the first page of two rows is the same one, what no context
    holds is NaN (page 0, too), and unused entries of the table lie outside the pool.
    """
    rng = np.random.default_rng(seed)
    B, L = len(context_lens), 2
    P = B * M + 3
    table_BM = rng.permutation(np.arange(1, P))[: B * M].reshape(B, M)
    long_rows = [b for b, n in enumerate(context_lens) if n >= T + C]
    for b in long_rows[1:2]:
        table_BM[b, 0] = table_BM[long_rows[0], 0]
    is_used_PC = np.zeros((P, C), bool)
    for b, n in enumerate(context_lens):
        for position in range(n):
            is_used_PC[table_BM[b, position // C], position % C] = True
        table_BM[b, -(-n // C) :] = rng.choice([0, -1, P, 2**31 - 1])
    pools = [
        rng.standard_normal((L, P, K, C, H)).astype(ml_dtypes.bfloat16) for _ in "kv"
    ]
    for pool in pools:
        pool.transpose(1, 3, 0, 2, 4)[~is_used_PC] = np.nan
    scales = [None, None]
    if dtype is not None:
        pools, scales = zip(*(_quantized(pool, dtype) for pool in pools), strict=True)
    q = rng.standard_normal((B, T, K, G, H)).astype(ml_dtypes.bfloat16)
    start_B = np.maximum(np.array(context_lens) - T, 0)
    positions_BT = start_B[:, None] + np.arange(T)
    tree_BT = None
    if has_tree:
        tree_BT, depth_BT = _trees(rng, B, T)
        positions_BT = start_B[:, None] + depth_BT
    sinks = rng.standard_normal((K, G)).astype(np.float32) * 2 if has_sinks else None
    arrays = AttentionArrays(
        page_table_BM=table_BM.astype(np.int32),
        positions_BT=positions_BT.astype(np.int32),
        context_len_B=np.array(context_lens, np.int32),
        tree_mask_BT=tree_BT,
        sinks_KG=sinks,
        k_scales=scales[0],
        v_scales=scales[1],
    )
    options = AttentionOptions(window=window, soft_cap=soft_cap, scale=scale)
    return Case(q, tuple(pools), arrays, options)


def on_device(case):
    """Queries, pools and arrays, as jax has them."""
    return jax.tree.map(jnp.asarray, (case.q_BTKGH, case.pools, case.arrays))


def interpreted(call):
    """What a kernel gives in the interpreter; a race or a failure is raised."""
    try:
        with compat.no_races():
            return np.asarray(call(compat.interpreter()))
    except BaseException:
        compat.reset_interpreter()
        raise


def relative_error(found, truth):
    """Largest absolute error over the largest absolute true value."""
    return np.abs(found.astype(np.float32) - truth).max() / np.abs(truth).max()


def _trees(rng, B, T):
    """Masks and depths of random trees; node 0 is the root."""
    mask_BT, depth_BT = np.ones((B, T), np.int32), np.zeros((B, T), np.int32)
    for b in range(B):
        for node in range(1, T):
            parent = rng.integers(node)
            mask_BT[b, node] = mask_BT[b, parent] | 1 << node
            depth_BT[b, node] = depth_BT[b, parent] + 1
    return mask_BT, depth_BT


def _quantized(pool, dtype):
    """8-bit numbers and a scale per token; the scale of an unused token is NaN."""
    wide = pool.astype(np.float32)
    top = np.abs(wide).max(-1)
    limit = 127 if dtype == np.int8 else 448
    scale = (top / limit).astype(np.float32)
    unit = np.where(np.isnan(wide), 77, wide / scale[..., None])
    return (np.rint(unit) if dtype == np.int8 else unit).astype(dtype), scale
