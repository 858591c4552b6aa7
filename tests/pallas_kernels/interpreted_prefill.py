"""The prefill kernel in Mosaic's interpreter, with its race detector, against numpy.

Every ring wraps: races over slots show only where tiles outnumber them.
"""

import dataclasses
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import LAYER, Case, interpreted, on_device, relative_error

from headrace.pallas_kernels import compat
from headrace.pallas_kernels.paged_attention import mosaic_gpu_prefill
from headrace.pallas_kernels.paged_attention.loads import loaded_keys
from headrace.pallas_kernels.paged_attention.mosaic_gpu_prefill import (
    PrefillTuning,
    prefill_tuning,
)
from headrace.pallas_kernels.paged_attention.options import (
    AttentionArrays,
    AttentionOptions,
)

TWO_SLOTS = PrefillTuning(keys=64, stages=2)


def _case(
    chunks, *, T=64, K=1, G=2, H=64, C=16, has_sinks=False, seed=0, unused=np.nan,
    **options,
):  # fmt: skip
    """Rows of (keys before the chunk, its length) over pages out of order.

    Two rows share their first page. Keys and values that no row holds are `unused`,
    page 0 too, and entries of the table past the context lie outside the pool.
    """
    rng = np.random.default_rng(seed)
    start_B, length_B = np.array(chunks, np.int32).T
    context_B = start_B + length_B
    B, M = len(chunks), -(-max(context_B) // C) + 1
    P = B * M + 2
    table_BM = rng.permutation(np.arange(1, P))[: B * M].reshape(B, M)
    with_prefix = np.flatnonzero(start_B >= C)
    table_BM[with_prefix, 0] = table_BM[with_prefix[:1], 0]
    is_used_PC = np.zeros((P, C), bool)
    for b, n in enumerate(context_B):
        at = np.arange(n)
        is_used_PC[table_BM[b, at // C], at % C] = True
        table_BM[b, -(-n // C) :] = [-1, P, 2**31 - 1, 0][b % 4]
    pools = [rng.standard_normal((2, P, K, C, H)) for _ in "kv"]
    for pool in pools:
        pool.transpose(1, 3, 0, 2, 4)[~is_used_PC] = unused
    q = rng.standard_normal((B, T, K, G, H))
    # Above all scores, and below most.
    sinks_KG = np.linspace(4, -1, K * G, dtype=np.float32).reshape(K, G)
    arrays = AttentionArrays(
        page_table_BM=table_BM.astype(np.int32),
        positions_BT=(start_B[:, None] + np.arange(T)).astype(np.int32),
        context_len_B=context_B,
        sinks_KG=sinks_KG if has_sinks else None,
    )
    bf16 = ml_dtypes.bfloat16
    pools = tuple(pool.astype(bf16) for pool in pools)
    return Case(q.astype(bf16), pools, arrays, AttentionOptions(**options))


def _truth(case):
    """Zeros for queries at or past the context, as the kernel gives them."""
    is_padding_BT = case.arrays.positions_BT >= case.arrays.context_len_B[:, None]
    out = case.truth()
    out[is_padding_BT] = 0
    return out


def _run(case, tuning=TWO_SLOTS, module=mosaic_gpu_prefill, layer=LAYER):
    num_tiles = -(-int(case.arrays.context_len_B.max()) // tuning.keys)
    assert num_tiles > tuning.stages, "the ring does not wrap"
    q, pools, arrays = on_device(case)

    def call(interpret):
        return module.paged_prefill_mosaic(
            q, pools, layer, arrays, case.options, tuning=tuning, interpret=interpret
        )

    return interpreted(call)


def _check(case, tuning=TWO_SLOTS):
    out, truth = _run(case, tuning), _truth(case)
    assert np.isfinite(out).all()
    assert relative_error(out, truth) < 1e-2
    is_padding_BT = case.arrays.positions_BT >= case.arrays.context_len_B[:, None]
    assert not out[is_padding_BT].any()


@pytest.mark.parametrize(
    "case",
    [
        dict(chunks=[(0, 0), (0, 1), (0, 15), (0, 16), (0, 17), (210, 40)]),
        dict(chunks=[(140, 64), (32, 1)], H=128, C=32, G=3, has_sinks=True),
        dict(chunks=[(137, 60)], H=256, C=64, G=1, soft_cap=5.0, scale=0.3),
        dict(chunks=[(130, 62), (64, 0)], H=64, C=64, K=2, G=1, T=70, window=1),
        dict(chunks=[(170, 50), (0, 31)], H=256, C=16, window=70, has_sinks=True),
        dict(chunks=[(100, 93)], H=64, C=32, G=1, T=100, soft_cap=30.0, window=64),
    ],
    ids=str,
)
def test_equals_the_truth_without_a_race(case):
    _check(_case(**case))


TUNED = [(64, 32, 400), (128, 64, 260), (256, 32, 150)]


@pytest.mark.parametrize("H, C, prefix", TUNED)
def test_equals_the_truth_with_tuned_sizes(H, C, prefix):
    _check(_case([(prefix, 21)], H=H, C=C), prefill_tuning(H))


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_equals_the_truth_over_drawn_lengths(data):
    C = data.draw(st.sampled_from([16, 32, 64]), label="C")
    edges = [i * C + j for i in range(4) for j in (-1, 0, 1) if i * C + j >= 0]
    prefix, length = st.sampled_from(edges), st.integers(0, 64)
    chunks = st.lists(st.tuples(prefix, length), max_size=2)
    chunks = data.draw(chunks, label="chunks")
    windows = st.none() | st.sampled_from([2, 63, 64, 65, 130])
    window = data.draw(windows, label="window")
    _check(_case([*chunks, (129, 9)], C=C, G=1, window=window))


def test_bits_of_a_row_depend_on_no_other_row():
    case = _case([(0, 64), (133, 40), (0, 0), (190, 9)], G=1, has_sinks=True)
    together = _run(case)
    moved = _run(case.rows([3, 1]))
    alone = _run(case.rows([1]))
    assert np.array_equal(together[1], alone[0])
    assert np.array_equal(together[[3, 1]], moved)


def test_bits_of_a_query_depend_on_no_chunk():
    """Neither on where its chunk begins nor on how long it is."""
    whole = _case([(100, 80)], T=80, G=1, window=90)
    out = _run(whole)
    arrays = whole.arrays._replace(positions_BT=whole.arrays.positions_BT[:, 37:])
    rest = dataclasses.replace(whole, q_BTKGH=whole.q_BTKGH[:, 37:], arrays=arrays)
    assert np.array_equal(_run(rest), out[:, 37:])


@pytest.mark.parametrize(
    "chunk, options",
    [((250, 200), dict(T=200, G=3, C=32)), ((320, 70), dict(T=70, G=4, window=60))],
    ids=str,
)
def test_pages_are_loaded_as_often_as_the_compile_gate_counts(chunk, options):
    case = _case([chunk], **options)
    with compat.counted_copies() as copies:
        _run(case, prefill_tuning(64))
    _, T, K, G, H = case.q_BTKGH.shape
    C = case.pools[0].shape[3]
    keys = loaded_keys(T, G, H, sum(chunk), window=case.options.window)
    assert copies[C, H] == 2 * K * keys // C > 0


def test_a_page_outside_the_pool_is_read_as_page_0():
    case = _case([(150, 20)], G=1, unused=0.5)
    found = []
    for page in (0, -5, case.pools[0].shape[1]):
        table_BM = case.arrays.page_table_BM.copy()
        table_BM[0, 2] = page
        arrays = case.arrays._replace(page_table_BM=table_BM)
        found.append(_run(dataclasses.replace(case, arrays=arrays)))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_the_layer_is_an_argument_of_the_compiled_kernel():
    case = _case([(150, 20)], G=1)
    swapped = dataclasses.replace(case, pools=tuple(p[::-1] for p in case.pools))
    run = jax.jit(lambda layer: mosaic_gpu_prefill.paged_prefill_mosaic(
        case.q_BTKGH, swapped.pools, layer, case.arrays, case.options,
        tuning=TWO_SLOTS, interpret=compat.interpreter(),
    ))  # fmt: skip
    for layer in (0, 1):
        expected = _run(case if layer == 0 else swapped)
        assert np.array_equal(np.asarray(run(layer)), expected)


WAIT = "plgpu.barrier_wait(refs.{}.at[slot])"
# Not those that the interpreter misses: the kernel's file lists them for review.
BUGS = {
    "the producer waits for no free slot": {
        f"lambda: {WAIT.format(name)}": "lambda: None" for name in ("k_free", "v_free")
    },
    "the consumer does not wait for keys": {WAIT.format("k_ready"): "pass"},
    "the consumer does not wait for values": {WAIT.format("v_ready"): "pass"},
    "the tail of the values stays": {
        "            _clear_tail(refs.v_ring.at[slot], num_held)\n": ""
    },
    "the tail begins one late": {"slot], num_held)": "slot], num_held + 1)"},
    "a query does not see its own key": {"(key <= row)": "(key < row)"},
    "a window is one too long": {"key > row - window": "key >= row - window"},
    "a tile at the window's edge counts as open": {
        "position + _QUERIES - 1 - window": "position - window"
    },
    "older sums are not rescaled": {"total * shrink": "total"},
    "the sink is a base-2 score": {"g] * LOG2E": "g]"},
    "the last unit is stored twice": {"unit < plan.num_units": "unit >= 0"},
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    with open(mosaic_gpu_prefill.__file__) as file:
        text = file.read()
    for right, wrong in BUGS[bug].items():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    mutant = types.ModuleType("mutant")
    exec(compile(text, "mutant", "exec"), mutant.__dict__)
    case = _case([(170, 25)], G=3, window=110, has_sinks=True)
    try:
        out = _run(case, module=mutant)
    except RuntimeError:  # a race, or a barrier that nobody waits for
        return
    assert not relative_error(out, _truth(case)) < 1e-2
