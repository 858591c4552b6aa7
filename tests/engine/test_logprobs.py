"""Log-probabilities against sorted truths, and their promises on bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import logprobs, thresholds

ROW_COUNTS = (1, 2, 3, 4, 8, 16, 32, 64)
SEARCHES = tuple(
    jax.jit(search, static_argnums=1)
    for search in (logprobs.top_ids_by_turns, logprobs.top_ids_by_ranks)
)


def _logits(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0, 3, (rows, width)).astype(np.float32)


@pytest.mark.parametrize("width", [7, 131, 512, 49152, 150001])
def test_log_total_has_the_same_bits_for_a_row_alone_and_among_others(width):
    z = _logits(64, width)
    total = jax.jit(logprobs.log_total)
    expected = np.asarray(total(jnp.array(z)))
    for count in ROW_COUNTS:
        for first in {0, 5 % (65 - count), 64 - count}:
            rows = jnp.array(z[first : first + count])
            assert np.array_equal(total(rows), expected[first : first + count])


@pytest.mark.parametrize("width", [512, 49152])
def test_log_total_has_the_same_bits_inside_a_larger_program(width):
    """Logits that are a slice of a larger array, and used for other things as well."""
    z = _logits(8, width)

    @jax.jit
    def both(z_BQV):
        z_BV = z_BQV[:8, 0]
        scores = logprobs.token_scores(z_BV, jnp.zeros(8, jnp.int32), 3)
        return scores.log_total_X, jnp.tanh(z_BV * 1.1).sum(-1)

    more = jnp.array(np.stack([z, z + 1], axis=1))
    alone = jax.jit(logprobs.log_total)(jnp.array(z))
    assert np.array_equal(both(jnp.concatenate([more, more]))[0], alone)


def test_an_exponential_has_the_same_bits_wherever_in_a_row_it_stands():
    """Blocks are padded to whole vectors, so no id is computed as a left-over lane."""
    x = np.random.default_rng(3).uniform(-80, 0, 5000).astype(np.float32)
    x[0] = 0
    alone = np.array([_weight_sum(x[:1]), *(_weight_sum(x[[0, i]]) for i in range(40))])
    in_row = np.asarray(jnp.exp(jnp.array(np.pad(x, (0, -len(x) % 128)))))
    assert np.array_equal(alone[1:], np.float32(1) + in_row[:40])


def _weight_sum(row):
    """The sum that log_total takes the log of, of one row whose maximum is 0."""
    padded = thresholds.in_blocks(jnp.array(row)[None]).reshape(1, -1)
    return np.asarray(jax.jit(lambda z: thresholds.row_sum(jnp.exp(z))[:, 0])(padded))[
        0
    ]


@pytest.mark.parametrize("shift", [0.0, 200.0, -3e4])
def test_log_total_is_true_far_from_zero(shift):
    z = _logits(4, 1000) + np.float32(shift)
    truth = np.log(np.exp(z.astype(np.float64) - shift).sum(1)) + shift
    assert np.allclose(logprobs.log_total(jnp.array(z)), truth, rtol=3e-7, atol=1e-6)


def test_log_total_counts_forbidden_ids_as_nothing():
    z = np.full((1, 300), -np.inf, np.float32)
    z[0, [3, 299]] = 1.5
    assert np.allclose(logprobs.log_total(jnp.array(z)), 1.5 + np.log(2), atol=1e-6)


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([5, 128, 700]),
    st.sampled_from([1, 20]),
    st.integers(1, 6),
    st.integers(0, 1000),
)
def test_likeliest_are_those_of_a_stable_sort(search, width, count, distinct, seed):
    rng = np.random.default_rng(seed)
    values = [-np.inf, -2.5, -0.0, 0.0, 3.5]
    z = rng.choice(values[:distinct], (3, width)).astype(np.float32)
    if distinct > len(values):
        z = _logits(3, width, seed)
    count = min(count, width)
    ids = np.asarray(search(jnp.array(z), count))
    assert np.array_equal(ids, np.argsort(-z, axis=1, kind="stable")[:, :count])


@pytest.mark.parametrize("search", SEARCHES)
def test_likeliest_may_all_lie_in_one_block_or_each_in_its_own(search):
    z = _logits(2, 4000)
    z[0, 256:276] += 50
    z[1, 7::200] += 50
    ids = np.asarray(search(jnp.array(z), 20))
    assert np.array_equal(ids, np.argsort(-z, axis=1)[:, :20])


def test_fewer_tokens_than_asked_gives_all_of_them_in_order():
    z = jnp.array([[1.0, 3.0, -jnp.inf, 3.0]])
    values, ids = logprobs.top_tokens(z, 20)
    assert ids.tolist() == [[1, 3, 0, 2]]
    assert values.tolist() == [[3.0, 3.0, 1.0, -np.inf]]


def test_no_top_tokens_asked_gives_none():
    values, ids = logprobs.top_tokens(jnp.ones((2, 5)), 0)
    assert values.shape == ids.shape == (2, 0)


def test_scores_are_those_of_the_raw_logits():
    z = _logits(3, 64)
    token = np.array([3, 10, 60])
    scores = logprobs.token_scores(jnp.array(z), jnp.array(token, jnp.int32), 5)
    truth = z - np.log(np.exp(z.astype(np.float64)).sum(1, keepdims=True))
    assert np.allclose(scores.logprob_X, truth[np.arange(3), token], atol=1e-5)
    order = np.argsort(-z, axis=1)
    assert scores.top_ids_XJ.tolist() == order[:, :5].tolist()
    expected = np.take_along_axis(truth, order[:, :5], 1)
    assert np.allclose(scores.top_logprobs_XJ, expected, atol=1e-5)
    for row in range(3):
        assert order[row, scores.rank_X[row] - 1] == token[row]


def test_tokens_that_tie_share_the_best_rank():
    z = jnp.array([[2.0, 5.0, 2.0, 1.0]] * 3)
    scores = logprobs.token_scores(z, jnp.array([0, 2, 3], jnp.int32), 1)
    assert scores.rank_X.tolist() == [2, 2, 4]


def test_the_chosen_token_has_the_same_bits_among_the_likeliest():
    z = jnp.array(_logits(4, 700))
    chosen = z.argmax(-1).astype(jnp.int32)
    scores = jax.jit(logprobs.token_scores, static_argnums=2)(z, chosen, 3)
    assert np.array_equal(scores.logprob_X, scores.top_logprobs_XJ[:, 0])
