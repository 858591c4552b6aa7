"""The decode kernel in Mosaic's interpreter, with its race detector, against the truth.

Every ring wraps: a split has more tiles than the ring has slots.
"""

import dataclasses
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import LAYER, interpreted, make_case, on_device, relative_error

from headrace.pallas_kernels import compat, gpu_target
from headrace.pallas_kernels.paged_attention import (
    mosaic_gpu,
    mosaic_gpu_decode,
    tuning,
)
from headrace.pallas_kernels.paged_attention.loads import loaded_keys
from headrace.pallas_kernels.paged_attention.mosaic_gpu_decode import (
    paged_decode_mosaic,
)
from headrace.pallas_kernels.paged_attention.xla import paged_attention_xla

TWO_SLOTS = tuning.DecodeTuning(stages=2, split=256)


@pytest.fixture(autouse=True)
def two_slots(monkeypatch):
    """Small rings and splits, so that both end within short contexts."""
    monkeypatch.setattr(tuning, "decode_tuning", lambda head_dim: TWO_SLOTS)


def run(case):
    q, pools, arrays = on_device(case)

    def call(interpret):
        return mosaic_gpu.paged_attention_mosaic(
            q, pools, LAYER, arrays, case.options, interpret=interpret
        )

    return interpreted(call)


@pytest.mark.parametrize(
    "options",
    [
        dict(context_lens=[0, 1, 15, 16, 17, 300], G=4, M=20),
        dict(context_lens=[2, 290], T=2, G=8, H=128, C=32, M=10),
        dict(context_lens=[3, 270], T=3, G=3, K=2, C=64, M=5, has_sinks=True),
        dict(context_lens=[270, 8], T=8, G=8, C=32, M=9, window=40),
        dict(context_lens=[65, 280], G=1, H=256, C=64, M=5, soft_cap=5.0, scale=0.2),
        dict(context_lens=[300, 33], T=7, G=2, M=20, has_tree=True),
        dict(context_lens=[280], T=8, G=2, C=64, M=5, has_tree=True, window=4),
        dict(context_lens=[600, 255], G=2, C=64, M=10, window=200, has_sinks=True),
        dict(context_lens=[33, 250], T=2, G=2, C=32, M=8, dtype=np.int8),
        dict(
            context_lens=[250], G=4, H=128, C=32, M=8, dtype=ml_dtypes.float8_e4m3fn,
            has_sinks=True,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_equals_the_truth_without_a_race(options):
    case = make_case(**options)
    out = run(case)
    assert np.isfinite(out).all()
    assert relative_error(out, case.truth()) < 1e-2


# Tokens, heads a group, head dim and page size go with each other as in models:
# Llama 3 (4, 128), Qwen 2.5 (7, 128), Gemma 2 and 3 (2, 256), Mistral (4, 128), SmolLM2
# (3, 64).
SHAPES = [(4, 128, 32), (7, 128, 64), (2, 256, 16), (1, 128, 16), (3, 64, 64)]


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_equals_the_truth_over_drawn_lengths(data):
    T = data.draw(st.sampled_from([1, 2, 5]), label="T")
    G, H, C = data.draw(st.sampled_from(SHAPES), label="G, H, C")
    length = st.integers(0, 5) | st.integers(-1, 1).map(lambda i: 4 * C + i)
    lengths = data.draw(
        st.lists(length | st.integers(250, 320), min_size=1, max_size=3)
    )
    case = make_case(
        [n if n >= T else 0 for n in lengths], T=T, G=G, H=H, C=C, M=-(-320 // C),
        window=data.draw(st.none() | st.sampled_from([1, 63, 64, 130]), label="window"),
        soft_cap=data.draw(st.none() | st.just(20.0), label="soft_cap"),
        has_sinks=data.draw(st.booleans(), label="sinks"),
        seed=data.draw(st.integers(0, 99), label="seed"),
    )  # fmt: skip
    out, truth = run(case), case.truth()
    assert np.isfinite(out).all()
    assert np.abs(out.astype(np.float32) - truth).max() <= 1e-2 * np.abs(truth).max()


def test_rounds_no_worse_than_plain_xla_in_bfloat16():
    case = make_case([300, 280, 64], T=2, G=4, H=128, C=32, M=10, seed=3)
    q, pools, arrays = on_device(case)
    plain = paged_attention_xla(q, pools, LAYER, arrays, case.options)
    errors = [
        relative_error(np.asarray(out), case.truth()) for out in (plain, run(case))
    ]
    assert errors[1] < 2 * errors[0]


def test_a_rows_bits_depend_on_neither_its_place_nor_its_company():
    case = make_case([300, 65, 0, 290], T=2, G=3, C=16, M=20, window=250)
    together = run(case)
    moved = run(case.rows([3, 0, 1]))
    for place, row in enumerate([3, 0, 1]):
        assert moved[place].tobytes() == together[row].tobytes()
        assert run(case.rows([row]))[0].tobytes() == together[row].tobytes()
    # Whatever is in the rows that decode nothing.
    quiet = case.arrays._replace(context_len_B=np.array([300, 0, 0, 0], np.int32))
    alone = run(dataclasses.replace(case, arrays=quiet))
    assert alone[0].tobytes() == together[0].tobytes()
    assert not alone[1:].any()


def test_splits_without_keys_are_neither_written_nor_read():
    """The interpreter's memory begins as NaN: one read of it would show."""
    case = make_case([520, 10], G=2, C=64, M=16, window=100)
    q, pools, arrays = on_device(case)
    last_page = pools[0].shape[1] - 1
    arrays = arrays._replace(page_table_BM=jnp.clip(arrays.page_table_BM, 0, last_page))
    acc, _, _ = paged_decode_mosaic(
        q, pools, LAYER, arrays, case.options,
        tuning=TWO_SLOTS, interpret=compat.interpreter(),
    )  # fmt: skip
    is_written_SB = np.isfinite(np.asarray(acc)).all((2, 3, 4))
    assert is_written_SB.T.tolist() == [
        [False, True, True, False], [True, False, False, False]
    ]  # fmt: skip
    live = mosaic_gpu.live_splits(arrays, case.options, TWO_SLOTS.split)
    assert live.tolist() == [[1, 3], [0, 1]]
    assert relative_error(run(case), case.truth()) < 1e-2


@pytest.mark.parametrize(
    "options",
    [
        dict(context_lens=[0, 1, 64, 65, 300], G=2, C=16, M=20, K=2),
        dict(context_lens=[300, 70], T=3, G=2, C=32, M=10, window=100),
    ],
    ids=str,
)
def test_pages_are_loaded_as_often_as_the_compile_gate_counts(options):
    case = make_case(**options)
    with compat.counted_copies() as copies:
        run(case)
    _, T, K, G, H = case.q_BTKGH.shape
    keys = sum(
        loaded_keys(T, G, H, length, window=case.options.window)
        for length in options["context_lens"]
    )
    assert copies[options["C"], H] == 2 * K * keys // options["C"] > 0


# One mistake each in how warpgroups wait for each other; `to` replaces `what`.
PLANTED = {
    "the producer never waits for a free slot": (
        "pl.when(i >= stages)(wait)", "pass",
    ),
    "the consumer does not wait for keys": (
        'plgpu.barrier_wait(refs["k_arrived"].at[slot])', "pass",
    ),
    "the consumer does not wait for values": (
        'plgpu.barrier_wait(refs["v_arrived"].at[slot])', "pass",
    ),
    "values past the context are not cleared": (
        '@pl.when(num_left < TILE)', "@pl.when(num_left < 0)",
    ),
    "a page of another head": ("layer, page, live.head]", "layer, page, 0]"),
    "the layer is ignored": ('layer = refs["layer"][0]', "layer = 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name, monkeypatch):
    """Those that no interpreter sees are rules for review in the kernel's header."""
    what, to = PLANTED[name]
    source = pathlib.Path(mosaic_gpu_decode.__file__).read_text("utf-8")
    assert source.count(what) == 1
    mutant = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    exec(compile(source.replace(what, to), "mutant.py", "exec"), mutant.__dict__)
    monkeypatch.setattr(mosaic_gpu, "paged_decode_mosaic", mutant.paged_decode_mosaic)
    case = make_case([300], G=2, K=2, C=64, M=5)
    try:
        out = run(case)
    except Exception:
        return  # a race, or a barrier that nobody waited for
    assert not relative_error(out, case.truth()) < 1e-2


def test_it_is_one_kernel_for_all_layers():
    case = make_case([20], C=16)
    q, pools, arrays = on_device(case)

    def attend(q, pools, layer, arrays):
        return mosaic_gpu.paged_attention_mosaic(q, pools, layer, arrays, case.options)

    with gpu_target.compiling_for((9, 0)):
        traced = jax.jit(attend).trace(q, pools, jnp.int32(1), arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Traced, so a kernel that needed its value would not have been made.
    assert len(re.findall(r"custom_call @mosaic_gpu\w*\(", text)) == 2
