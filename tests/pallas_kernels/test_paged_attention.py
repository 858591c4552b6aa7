"""Paged attention, in plain XLA and in C++, against the dense float32 truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.pallas_kernels import native
from headrace.pallas_kernels.paged_attention import cpu
from headrace.pallas_kernels.paged_attention.api import cpu_identity, paged_attention
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
)
from headrace.pallas_kernels.paged_attention.reference import (
    paged_attention_reference,
)
from headrace.pallas_kernels.paged_attention.xla import paged_attention_xla

needs_compiler = pytest.mark.skipif(
    native.compiler() is None, reason="there is no C++ compiler here"
)
IMPLEMENTATIONS = [
    paged_attention_xla,
    pytest.param(cpu.paged_attention_cpu, marks=needs_compiler),
]
both = pytest.mark.parametrize("attention", IMPLEMENTATIONS)

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


def _run(case, attention=paged_attention, layer=1):
    arrays = jax.tree.map(jnp.array, case)
    q, pools = arrays.pop("q_BTKGH"), arrays.pop("pools")
    if attention is not paged_attention:
        arrays = {
            "arrays": AttentionArrays(**arrays), "options": AttentionOptions()
        }  # fmt: skip
    return np.asarray(attention(q, pools, layer, **arrays))


def _truth(case, layer=1):
    rest = dict(case)
    q, pools = rest.pop("q_BTKGH"), rest.pop("pools")
    return paged_attention_reference(
        q, pools, layer, AttentionArrays(**rest), AttentionOptions()
    )


@both
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=3),
    st.sampled_from([1, 4, 7]),
    st.integers(0, 2**16),
)
def test_equals_the_dense_truth_over_ragged_lengths(attention, lengths, queries, seed):
    case = _case(lengths, [min(queries, n) for n in lengths], seed)
    out, truth = _run(case, attention), _truth(case)
    for b, n in enumerate(lengths):
        valid = min(queries, n)
        error = np.abs(out[b, :valid] - truth[b, :valid])
        assert error.max() < 2e-5


@both
def test_nan_behind_the_context_does_not_leak(attention):
    case = _case([1, 17, 130, 128], [1, 1, 1, 1], fill=np.nan)
    clean = _case([1, 17, 130, 128], [1, 1, 1, 1])
    assert np.array_equal(_run(case, attention), _run(clean, attention))


@both
def test_bits_do_not_depend_on_the_longest_context_of_the_batch(attention):
    alone = _case([50, 60], [1, 1])
    company = dict(alone, context_len_B=np.array([50, 300], np.int32))
    company["positions_BT"] = np.array([[49], [299]], np.int32)
    bits = [_run(case, attention)[0] for case in (alone, company)]
    assert np.array_equal(*bits)


@both
def test_a_row_without_context_gives_zeros(attention):
    case = _case([40, 1], [1, 1])
    case["context_len_B"] = np.array([40, 0], np.int32)
    out = _run(case, attention)[1]
    assert np.array_equal(out, np.zeros_like(out))


def _rows(case, rows, tokens=slice(None)):
    """The same pools, fewer rows and query tokens."""
    return dict(
        case,
        q_BTKGH=case["q_BTKGH"][rows, tokens],
        positions_BT=case["positions_BT"][rows, tokens],
        page_table_BM=case["page_table_BM"][rows],
        context_len_B=case["context_len_B"][rows],
    )


@needs_compiler
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(9, 300), min_size=2, max_size=4),
    st.integers(1, 9),
    st.integers(0, 2**16),
)
def test_a_query_of_the_cpu_kernel_has_its_bits_whatever_shares_the_call(
    lengths, queries, seed
):
    case = _case(lengths, [queries] * len(lengths), seed)
    together = _run(case, cpu.paged_attention_cpu)
    for b in range(len(lengths)):
        t = b % queries
        alone = _rows(case, slice(b, b + 1), slice(t, t + 1))
        assert np.array_equal(
            _run(alone, cpu.paged_attention_cpu)[0, 0], together[b, t]
        )


@needs_compiler
@pytest.mark.parametrize("group", [1, 2, 4, 8, 30])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_the_cpu_kernel_has_many_head_and_group_sizes(group, head_dim):
    rng = np.random.default_rng(group)
    case = _case([150, 20], [2, 2])
    case["q_BTKGH"] = rng.standard_normal((2, 2, K, group, head_dim), np.float32)
    shape = (*case["pools"][0].shape[:-1], head_dim)
    case["pools"] = tuple(rng.standard_normal(shape, np.float32) for _ in "kv")
    out = _run(case, cpu.paged_attention_cpu)
    assert np.abs(out - _truth(case)).max() < 2e-5


@needs_compiler
def test_the_cpu_kernel_widens_bfloat16_pages_exactly():
    case = _case([150, 20], [2, 2])
    narrow = tuple(jnp.asarray(pool, jnp.bfloat16) for pool in case["pools"])
    wide = tuple(np.asarray(pool, np.float32) for pool in narrow)
    bits = [
        _run(dict(case, pools=pools), cpu.paged_attention_cpu)
        for pools in (narrow, wide)
    ]
    assert np.array_equal(*bits)


@needs_compiler
def test_the_api_takes_the_cpu_kernel_where_it_serves():
    case = _case([150, 20], [1, 1])
    assert cpu_identity(G, H, C, "float32")
    assert np.array_equal(_run(case), _run(case, cpu.paged_attention_cpu))


@pytest.mark.parametrize(
    ("group", "head_dim", "page_size", "dtype"),
    [
        (3, 24, 16, "float32"),
        (3, 1024, 16, "float32"),
        (65, 16, 16, "float32"),
        (3, 16, 8, "float32"),
        (3, 16, 16, "float16"),
    ],
)
def test_sizes_that_the_cpu_kernel_lacks_go_to_plain_xla(
    group, head_dim, page_size, dtype
):
    assert cpu_identity(group, head_dim, page_size, dtype) == ""


@pytest.fixture
def other_compiler(monkeypatch):
    """Names another C++ compiler; forgets what this process has built, then and now."""
    caches = (native.compiler, native.identity, native.load, cpu._target)

    def choose(variable, value):
        monkeypatch.setenv(variable, value)
        for cache in caches:
            cache.cache_clear()

    yield choose
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_NATIVE", "0", "no C++ compiler"),
        ("CXX", "no-such-compiler", "no C++ compiler"),
        ("CXX", "false", "plain XLA instead of cpu.cc"),
    ],
)
def test_without_a_working_compiler_plain_xla_serves_and_says_so(
    other_compiler, caplog, variable, value, message
):
    other_compiler(variable, value)
    case = _case([150, 20], [1, 1])
    assert np.array_equal(_run(case), _run(case, paged_attention_xla))
    assert len(caplog.messages) == 1 and message in caplog.messages[0]


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
