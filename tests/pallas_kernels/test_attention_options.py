"""What paged attention does besides causal rows: in plain XLA, or refused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import LAYER, make_case

from headrace.pallas_kernels.paged_attention import api


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
        assert texts[0].count("custom_call @mosaic_gpu") == 2  # decode, merge
        assert not caplog.messages
    else:
        assert "mosaic_gpu" not in texts[0]
        (message,) = caplog.messages
        assert reason in message


def test_a_forced_kernel_that_does_not_serve_says_why():
    with pytest.raises(NotImplementedError, match="head_dim 32"):
        attend(make_case([20], H=32), implementation="mosaic_gpu")
    case = make_case([20], window=3)
    with pytest.raises(NotImplementedError, match="no CPU kernel"):
        attend(case, implementation="cpu")
