"""The XLA paged attention against the dense float32 truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels.paged_attention.api import paged_attention
from headrace.pallas_kernels.paged_attention.reference import (
    paged_attention_reference,
)

L, K, G, H, C, M = 2, 2, 3, 16, 16, 20


def _case(context_lens, query_lens, seed=0, fill=None):
    """Ragged rows over shuffled pages; unused tails hold NaN if fill is NaN."""
    rng = np.random.default_rng(seed)
    B, T = len(context_lens), max(query_lens)
    pages = 1 + B * M
    pools = [rng.standard_normal((L, pages, K, C, H)).astype(np.float32) for _ in "kv"]
    table = rng.permutation(np.arange(1, pages)).reshape(B, M).astype(np.int32)
    if fill is not None:
        for pool in pools:
            pool[:, 0] = fill
        for b, length in enumerate(context_lens):
            for position in range(length, M * C):
                for pool in pools:
                    pool[:, table[b, position // C], :, position % C] = fill
    q = rng.standard_normal((B, T, K, G, H)).astype(np.float32)
    start = np.array(context_lens) - np.array(query_lens)
    positions = np.maximum(start, 0)[:, None] + np.arange(T)
    return dict(
        q_BTKGH=q,
        pools=tuple(pools),
        page_table_BM=table,
        positions_BT=positions.astype(np.int32),
        context_len_B=np.array(context_lens, np.int32),
    )


def _run(case, layer=1):
    arrays = jax.tree.map(jnp.array, case)
    q, pools = arrays.pop("q_BTKGH"), arrays.pop("pools")
    return np.asarray(paged_attention(q, pools, layer, **arrays))


def _truth(case, layer=1):
    rest = dict(case)
    q, pools = rest.pop("q_BTKGH"), rest.pop("pools")
    return paged_attention_reference(q, pools, layer, **rest)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 2**16),
)
def test_equals_the_dense_truth_over_ragged_lengths(lengths, queries, seed):
    case = _case(lengths, [min(queries, n) for n in lengths], seed)
    assert np.abs(_run(case) - _truth(case))[:, :1].max() < 2e-5
    for b, n in enumerate(lengths):
        valid = min(queries, n)
        error = np.abs(_run(case)[b, :valid] - _truth(case)[b, :valid])
        assert error.max() < 2e-5


def test_nan_behind_the_context_does_not_leak():
    case = _case([1, 17, 130, 128], [1, 1, 1, 1], fill=np.nan)
    clean = _case([1, 17, 130, 128], [1, 1, 1, 1])
    assert np.array_equal(_run(case), _run(clean))


def test_bits_do_not_depend_on_the_longest_context_of_the_batch():
    alone = _case([50, 60], [1, 1])
    company = dict(alone, context_len_B=np.array([50, 300], np.int32))
    company["positions_BT"] = np.array([[49], [299]], np.int32)
    assert np.array_equal(_run(alone)[0], _run(company)[0])


def test_a_row_without_context_gives_zeros():
    case = _case([40, 1], [1, 1])
    case["context_len_B"] = np.array([40, 0], np.int32)
    assert np.array_equal(_run(case)[1], np.zeros_like(_run(case)[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer=2), r"layer must lie in \[0, 1\], got 2"),
        (dict(heads=3), "do not fit pools"),
        (dict(page=24), "must divide 128, got 24"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_value(change, message):
    case = _case([40], [1])
    if "heads" in change:
        case["q_BTKGH"] = case["q_BTKGH"][:, :, :1]
    if "page" in change:
        case["pools"] = tuple(np.zeros((L, 3, K, 24, H), np.float32) for _ in "kv")
    with pytest.raises(ValueError, match=message):
        _run(case, layer=change.get("layer", 1))
