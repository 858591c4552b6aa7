"""Random arguments of paged attention for the self-check, and their float32 truth.

Pages are out of order, two rows share one, what no context holds is NaN, page 0 too,
and entries of tables past a context lie outside the pool. The truth is that of
`paged_attention/reference.py` (a test holds them together) in matrix products, since
numpy's loop over queries takes minutes at a model's own sizes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

LAYER, NUM_LAYERS = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What to draw.

    Attributes:
      name: for people.
      T, K, G, H, C: query tokens of a row, kv heads, query heads of one, head dim,
        tokens of a page.
      rows: of each row, the tokens before its queries and how many queries are valid;
        (0, 0) is a row that holds nothing.
      window, soft_cap: see AttentionOptions.
      has_sinks, has_tree: whether the arrays are there.
      pool: dtype of the pages.
    """

    name: str
    T: int
    K: int
    G: int
    H: int
    C: int
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_tree: bool = False
    pool: str = "bfloat16"

    @property
    def is_narrow(self) -> bool:
        """Whether pages hold 8-bit numbers with scales."""
        return self.pool != "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of `api.paged_attention` in numpy.

    Attributes:
      arrays: page_table_BM, positions_BT, context_len_B, and tree_mask_BT, sinks_KG,
        scales where the shape has them.
    """

    shape: Shape
    q_BTKGH: np.ndarray
    pools: tuple[np.ndarray, np.ndarray]
    arrays: dict[str, Any]

    @property
    def valid_BT(self) -> np.ndarray:
        """Which queries are no padding."""
        length_B = np.array([length for _, length in self.shape.rows])
        return np.arange(self.shape.T) < length_B[:, None]

    def with_rows(self, rows: Sequence[int]) -> "Case":
        """Some of the rows, over the same pools."""
        index = list(rows)
        per_row = ("page_table_BM", "positions_BT", "context_len_B", "tree_mask_BT")
        arrays = {
            name: value[index] if name in per_row else value
            for name, value in self.arrays.items()
        }
        kept = tuple(self.shape.rows[row] for row in index)
        shape = dataclasses.replace(self.shape, rows=kept)
        return dataclasses.replace(
            self, shape=shape, q_BTKGH=self.q_BTKGH[index], arrays=arrays
        )


def ragged(C: int, T: int, longest: int, split: int = 512) -> tuple:
    """Rows whose T queries are their last: at the edges of pages, tiles and splits.

    Args:
      C: tokens of a page.
      T: queries of a row.
      longest: tokens of the longest row.
      split: keys of one program.
    """
    edges = {0, 1, C - 1, C, C + 1, split - 1, split, split + 1, longest - 7, longest}
    lengths = sorted(n for n in edges if n == 0 or T <= n <= longest)
    return tuple((max(n - T, 0), min(n, T)) for n in lengths)


def make_case(shape: Shape, seed: int) -> Case:
    """Draws a case; equal seeds give equal cases."""
    rng = np.random.default_rng(seed)
    start_B, length_B = np.array(shape.rows, np.int32).T
    context_B = (start_B + length_B).astype(np.int32)
    B, C = len(shape.rows), shape.C
    M = -(-int(context_B.max()) // C) + 1
    used_B = -(-context_B // C)
    P = int(used_B.sum()) + 2
    table_BM, is_used_PC = _pages(rng, used_B, (B, M, P), context_B, C)
    pools, scales = [], []
    for _ in "kv":
        size = (NUM_LAYERS, P, shape.K, C, shape.H)
        pool = rng.standard_normal(size, np.float32)
        pool, scale = _stored(pool, shape.pool)
        if shape.pool != "int8":
            pool.transpose(1, 3, 0, 2, 4)[~is_used_PC] = np.nan
        if scale is not None:
            scale.transpose(1, 3, 0, 2)[~is_used_PC] = np.nan
        pools.append(pool)
        scales.append(scale)
    q = rng.standard_normal((B, shape.T, shape.K, shape.G, shape.H), np.float32)
    position_BT = start_B[:, None] + np.arange(shape.T)
    arrays: dict[str, Any] = {"page_table_BM": table_BM, "context_len_B": context_B}
    if shape.has_tree:
        mask_BT, depth_BT = _trees(rng, B, shape.T)
        position_BT = start_B[:, None] + depth_BT
        arrays["tree_mask_BT"] = mask_BT
    arrays["positions_BT"] = position_BT.astype(np.int32)
    if shape.has_sinks:
        sinks_KG = 2 * rng.standard_normal((shape.K, shape.G), np.float32)
        arrays["sinks_KG"] = sinks_KG
    if shape.is_narrow:
        arrays["scales"] = tuple(scales)
    return Case(
        shape=shape,
        q_BTKGH=q.astype(ml_dtypes.bfloat16),
        pools=(pools[0], pools[1]),
        arrays=arrays,
    )


def truth(case: Case) -> np.ndarray:
    """[B, T, K, G, H] float32, from the very numbers that the kernel sees."""
    q_BTKGH = case.q_BTKGH.astype(np.float32)
    B, T, K, G, H = q_BTKGH.shape
    out_BTKGH = np.zeros(q_BTKGH.shape, np.float32)
    scales = case.arrays.get("scales", (None, None))
    for b in range(B):
        if not case.arrays["context_len_B"][b]:
            continue
        k_KSH, v_KSH = (
            _row(pool, scale, case, b)
            for pool, scale in zip(case.pools, scales, strict=True)
        )
        q_KRH = q_BTKGH[b].transpose(1, 0, 2, 3).reshape(K, T * G, H)
        score = (q_KRH @ k_KSH.transpose(0, 2, 1)) * H**-0.5
        if case.shape.soft_cap is not None:
            score = case.shape.soft_cap * np.tanh(score / case.shape.soft_cap)
        seen_RS = np.repeat(_seen(case, b), G, axis=0)
        score = np.where(seen_RS, score, -np.inf)
        top = np.maximum(score.max(-1, keepdims=True), -1e30)
        weight = np.exp(score - top)
        total = weight.sum(-1, keepdims=True)
        if "sinks_KG" in case.arrays:
            sink_KR = np.tile(case.arrays["sinks_KG"], (1, T))
            # A query that sees nothing has no largest score; it gives zeros anyway.
            total = total + np.exp(np.minimum(sink_KR[..., None] - top, 80))
        out_KRH = (weight / np.where(total > 0, total, 1)) @ v_KSH
        out_BTKGH[b] = out_KRH.reshape(K, T, G, H).transpose(1, 0, 2, 3)
    return out_BTKGH


def relative_error(found: np.ndarray, expected: np.ndarray, valid: np.ndarray) -> float:
    """Largest absolute error over the largest absolute true value, of valid queries.

    Infinite where a valid result is not finite.
    """
    found = found[valid].astype(np.float32)
    if not np.isfinite(found).all():
        return float("inf")
    expected = expected[valid]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _pages(
    rng: np.random.Generator,
    used_B: np.ndarray,
    sizes: tuple[int, int, int],
    context_B: np.ndarray,
    C: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tables, and which places of the pool some context holds."""
    B, M, P = sizes
    free = rng.permutation(np.arange(1, P)).tolist()
    table_BM = np.zeros((B, M), np.int64)
    for b, used in enumerate(used_B):
        table_BM[b, :used] = [free.pop() for _ in range(used)]
        table_BM[b, used:] = (0, -1, P, 2**31 - 1)[b % 4]
    full = [b for b in range(B) if context_B[b] >= 2 * C]
    for b in full[1:2]:
        table_BM[b, 0] = table_BM[full[0], 0]
    is_used_PC = np.zeros((P, C), bool)
    for b, n in enumerate(context_B):
        at = np.arange(n)
        is_used_PC[table_BM[b, at // C], at % C] = True
    return table_BM.astype(np.int32), is_used_PC


def _stored(pool: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """As the pool's dtype holds it, with a scale per token where that has 8 bits."""
    if dtype == "bfloat16":
        return pool.astype(ml_dtypes.bfloat16), None
    limit = 127 if dtype == "int8" else 448
    scale = np.abs(pool).max(-1) / np.float32(limit)
    unit = pool / scale[..., None]
    return (np.rint(unit) if dtype == "int8" else unit).astype(np.dtype(dtype)), scale


def _trees(rng: np.random.Generator, B: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    """Masks and depths of random trees; node 0 is the root."""
    mask_BT, depth_BT = np.ones((B, T), np.int32), np.zeros((B, T), np.int32)
    for b in range(B):
        for node in range(1, T):
            parent = rng.integers(node)
            mask_BT[b, node] = mask_BT[b, parent] | 1 << node
            depth_BT[b, node] = depth_BT[b, parent] + 1
    return mask_BT, depth_BT


def _row(
    pool: np.ndarray, scale: np.ndarray | None, case: Case, row: int
) -> np.ndarray:
    """The row's keys or values [K, S, H], S its context."""
    S, C = int(case.arrays["context_len_B"][row]), pool.shape[3]
    ids = case.arrays["page_table_BM"][row, : -(-S // C)]
    pages_JKCH = pool[LAYER, ids].astype(np.float32)
    if scale is not None:
        pages_JKCH *= scale[LAYER, ids][..., None]
    J, K, _, H = pages_JKCH.shape
    return pages_JKCH.transpose(1, 0, 2, 3).reshape(K, J * C, H)[:, :S]


def _seen(case: Case, row: int) -> np.ndarray:
    """[T, S]: which keys each query sees; see AttentionArrays."""
    key_S = np.arange(int(case.arrays["context_len_B"][row]))
    position_T1 = case.arrays["positions_BT"][row][:, None]
    seen_TS = key_S <= position_T1
    if "tree_mask_BT" in case.arrays:
        node_S = key_S - position_T1[0]
        mask_T1 = case.arrays["tree_mask_BT"][row][:, None]
        is_node_S = (node_S >= 0) & (node_S < case.shape.T)
        of_tree_TS = (mask_T1 >> np.clip(node_S, 0, 31) & 1 == 1) & is_node_S
        seen_TS = (seen_TS & (node_S < 0)) | of_tree_TS
    if case.shape.window is not None:
        seen_TS &= key_S > position_T1 - case.shape.window
    return seen_TS
