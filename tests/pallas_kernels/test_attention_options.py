"""What paged attention does besides causal rows: in plain XLA, or refused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import LAYER, make_case, relative_error

from headrace.pallas_kernels import gpu_target
from headrace.pallas_kernels.paged_attention import api
from headrace.pallas_kernels.paged_attention.options import AttentionOptions
from headrace.scripts import gpu_kernels


def attend(case, **more):
    q, pools, arrays = jax.tree.map(
        jnp.asarray, (case.q_BTKGH, case.pools, case.arrays)
    )
    rest = arrays._asdict()
    scales = rest.pop("k_scales"), rest.pop("v_scales")
    more |= {"scales": None if scales[0] is None else scales, **rest}
    return api.paged_attention(q, pools, LAYER, options=case.options, **more)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_plain_xla_equals_the_truth_with_every_option(data):
    T = data.draw(st.sampled_from([1, 3, 8]), label="T")
    has_tree = data.draw(st.booleans(), label="tree")
    lengths = st.lists(st.just(0) | st.integers(T, 300), min_size=1, max_size=10)
    case = make_case(
        data.draw(lengths, label="lengths"), T=T, K=2, G=3, H=32, C=32, M=10,
        has_tree=has_tree,
        window=data.draw(st.none() | st.integers(1, 200), label="window"),
        soft_cap=data.draw(st.none() | st.just(5.0), label="soft_cap"),
        scale=data.draw(st.none() | st.just(0.3), label="scale"),
        has_sinks=data.draw(st.booleans(), label="sinks"),
        dtype=data.draw(
            st.sampled_from([None, np.int8, ml_dtypes.float8_e4m3fn]), label="dtype"
        ),
        seed=data.draw(st.integers(0, 99), label="seed"),
    )  # fmt: skip
    case = dataclasses.replace(case, q_BTKGH=case.q_BTKGH.astype(np.float32))
    out, truth = np.asarray(attend(case)), case.truth()
    assert np.isfinite(out).all()
    assert np.abs(out - truth).max() <= 1e-5 * max(1, np.abs(truth).max())


@pytest.mark.skipif(not api.cpu_identity(3, 32, 32, "int8"), reason="no C++ compiler")
@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from([np.int8, ml_dtypes.float8_e4m3fn]),
    T=st.sampled_from([1, 5]),
    lengths=st.lists(st.just(0) | st.integers(5, 300), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_the_cpu_kernel_reads_pages_of_8_bits(dtype, T, lengths, seed):
    case = make_case(lengths, T=T, K=2, G=3, H=32, C=32, M=10, dtype=dtype, seed=seed)
    case = dataclasses.replace(case, q_BTKGH=case.q_BTKGH.astype(np.float32))
    out, truth = np.asarray(attend(case, implementation="cpu")), case.truth()
    assert np.isfinite(out).all()
    assert np.abs(out - truth).max() <= 1e-5 * max(1, np.abs(truth).max())
    for row in range(len(lengths)):
        alone = attend(case.rows([row]), implementation="cpu")
        np.testing.assert_array_equal(alone[0], out[row])


@pytest.mark.skipif(not api.cpu_identity(3, 32, 32, "int8"), reason="no C++ compiler")
def test_the_cpu_kernel_knows_every_fp8_number():
    """A row with one key gives its value: 256 numbers in 8 values of 32."""
    bits = np.arange(256, dtype=np.uint8).reshape(1, 8, 1, 1, 32)
    pools = np.zeros((2, 9, 1, 32, 32), np.uint8)
    pools[LAYER, 1:, 0, 0] = bits[0, :, 0, 0]
    pool = jnp.asarray(pools.view(ml_dtypes.float8_e4m3fn))
    scales = jnp.ones(pool.shape[:4])
    out = api.paged_attention(
        jnp.zeros((8, 1, 1, 1, 32)),
        (jnp.zeros_like(pool), pool),
        LAYER,
        page_table_BM=jnp.arange(1, 9, dtype=jnp.int32)[:, None],
        positions_BT=jnp.zeros((8, 1), jnp.int32),
        context_len_B=jnp.ones(8, jnp.int32),
        scales=(scales, scales),
        implementation="cpu",
    )
    wanted = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32).ravel()
    np.testing.assert_array_equal(np.asarray(out).ravel(), wanted)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_page_outside_the_pool_is_read_as_page_0(implementation):
    case = make_case([40, 33], M=3)
    pools = [np.nan_to_num(pool.astype(np.float32), nan=0.5) for pool in case.pools]
    found = []
    for page in (0, -1, pools[0].shape[1], 2**31 - 1, -(2**31)):
        table_BM = case.arrays.page_table_BM.copy()
        table_BM[:, 1] = page
        found.append(
            api.paged_attention(
                jnp.asarray(case.q_BTKGH, jnp.float32),
                tuple(map(jnp.asarray, pools)),
                LAYER,
                page_table_BM=jnp.asarray(table_BM),
                positions_BT=jnp.asarray(case.arrays.positions_BT),
                context_len_B=jnp.asarray(case.arrays.context_len_B),
                implementation=implementation,
            )
        )
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_each_option_changes_the_output():
    """Else the test before could not tell that one is ignored."""
    base = make_case([120, 90], T=4, H=32, C=32)
    outs = [base.truth()]
    for more in (
        dict(window=20), dict(soft_cap=1.0), dict(scale=0.5), dict(has_sinks=True),
        dict(has_tree=True),
    ):  # fmt: skip
        outs.append(make_case([120, 90], T=4, H=32, C=32, **more).truth())
    for i, one in enumerate(outs):
        assert all(relative_error(one, other) > 1e-2 for other in outs[:i])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sinks_KG=np.zeros((2, 4), np.float32)), r"sinks_KG .* shape \(1, 4"),
        (dict(page_table_BM=np.zeros((1, 8), np.int64)), "page_table_BM must be int32"),
        (dict(context_len_B=np.zeros((2,), np.int32)), "context_len_B .* shape"),
        (dict(tree_mask_BT=np.zeros((1, 2), np.int32)), "tree_mask_BT must have shape"),
        (dict(scales=(np.zeros((2, 11, 1, 16), np.float32),) * 2), "8-bit pools, and"),
        (dict(implementation="cuda"), "implementation must be one of .*got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused_while_tracing(changes, message):
    case = make_case([20])
    with jax.enable_x64(True), pytest.raises(ValueError, match=message):
        fields = case.arrays._asdict() | changes
        scales = fields.pop("scales", None)
        del fields["k_scales"], fields["v_scales"]
        api.paged_attention(
            jnp.asarray(case.q_BTKGH), tuple(map(jnp.asarray, case.pools)), LAYER,
            **fields, scales=scales,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(window=0), "window must be at least 1, got 0"),
        (dict(soft_cap=0.0), "soft_cap must be a number above 0, got 0.0"),
        (dict(scale=float("inf")), "scale must be a number above 0, got inf"),
    ],
)
def test_options_out_of_their_range_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions(**values)


def test_pages_of_8_bits_need_32_tokens():
    case = make_case([20], C=16, dtype=np.int8)
    with pytest.raises(ValueError, match="at least 32 tokens, got 16"):
        attend(case)


def _lowered(case, capability):
    """What is compiled for a GPU, before XLA."""
    with gpu_target.compiling_for(capability):
        traced = jax.jit(lambda: attend(case)).trace()
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("options", "num_kernels"),
    [
        (dict(C=16), 2),  # decode and its merge
        (dict(C=32, T=8, dtype=np.int8, has_tree=True), 2),
        (dict(C=16, T=9), 1),  # a chunk
        (dict(C=16, T=8, G=5, H=256), 1),
        # As many query rows as spill nothing: fewer with a soft cap.
        (dict(C=16, T=8, G=8, H=128), 2),
        (dict(C=16, T=8, G=8, H=128, soft_cap=30.0), 1),
        (dict(C=16, T=8, G=4, H=128, soft_cap=30.0), 2),
        (dict(C=16, T=8, G=2, H=256, soft_cap=30.0), 2),
    ],
    ids=str,
)
def test_a_hopper_gpu_gets_the_kernels(options, num_kernels, caplog):
    text = _lowered(make_case([20, 40], **options), (9, 0))
    assert text.count("custom_call @mosaic_gpu") == num_kernels
    assert not caplog.messages


@pytest.mark.parametrize(
    ("capability", "options", "reason"),
    [
        ((10, 0), dict(), "compute capability (10, 0), not (9, 0)"),
        ((8, 0), dict(), "compute capability (8, 0), not (9, 0)"),
        ((9, 0), dict(H=32), "head_dim 32"),
        ((9, 0), dict(T=9, has_tree=True), "a tree of 9 nodes with 4 heads"),
        ((9, 0), dict(C=32, T=9, dtype=np.int8), "chunks over int8 pools"),
        ((9, 0), dict(C=32, T=8, H=256, dtype=np.int8), "chunks over int8 pools"),
    ],
)
def test_other_gpus_and_shapes_get_plain_xla_and_hear_why_once(
    capability, options, reason, caplog
):
    api._say_once.cache_clear()
    case = make_case([20, 40], **options)
    assert "mosaic_gpu" not in _lowered(case, capability) + _lowered(case, capability)
    (message,) = caplog.messages
    assert reason in message


def test_tuned_shapes_are_served_and_have_every_width_page_size_and_type():
    shapes = list(api.tuned_shapes())
    assert len(set(shapes)) == len(shapes)
    decode = [s for s in shapes if s.num_tokens <= 8]
    for H, widest in ((64, 64), (128, 64), (256, 32)):
        of_dim = [s for s in decode if s.head_dim == H]
        assert max(s.num_tokens * s.group for s in of_dim) == widest
        assert {(s.dtype, s.page_size) for s in of_dim} == {
            ("bfloat16", 16), ("bfloat16", 32), ("bfloat16", 64), ("int8", 32),
            ("int8", 64), ("float8_e4m3fn", 32), ("float8_e4m3fn", 64),
        }  # fmt: skip
        assert {s.has_tree for s in of_dim} == {s.soft_cap is None for s in of_dim}
    chunks = [s for s in shapes if s.num_tokens == 512]
    assert len(chunks) == 3 * 3 * 2
    for shape in shapes[::20]:
        program = gpu_kernels.attention_program(shape)
        with gpu_target.compiling_for((9, 0)):
            traced = jax.jit(program.function).trace(*program.args)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @mosaic_gpu" in text


def test_a_forced_kernel_that_does_not_serve_says_why():
    with pytest.raises(NotImplementedError, match="head_dim 32"):
        attend(make_case([20], H=32), implementation="mosaic_gpu")
    case = make_case([20], window=3)
    with pytest.raises(NotImplementedError, match="no CPU kernel"):
        attend(case, implementation="cpu")
