"""The sampler against sorted-vocabulary truths, and its promises on bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import sampler

V = 64


def _draw(z_BV, *, seed=1, position=3, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    B = z_BV.shape[0]
    tokens = sampler.sample_tokens(
        jnp.array(z_BV),
        seed_B2=jnp.broadcast_to(jnp.array([seed, 0], jnp.uint32), (B, 2)),
        position_B=jnp.broadcast_to(jnp.array(position, jnp.int32), (B,)),
        temperature_B=jnp.full(B, temperature, jnp.float32),
        top_k_B=jnp.full(B, top_k, jnp.int32),
        top_p_B=jnp.full(B, top_p, jnp.float32),
        min_p_B=jnp.full(B, min_p, jnp.float32),
    )
    return np.asarray(tokens)


def _logits(rows, seed=0):
    return np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32)


def test_greedy_takes_the_lowest_id_of_a_tie():
    z = np.zeros((1, V), np.float32)
    z[0, [5, 9]] = 1.0
    assert _draw(z, temperature=0.0) == [5]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(1, 5), st.integers(0, 1000))
def test_greedy_is_argmax_at_any_width(width, distinct, seed):
    rng = np.random.default_rng(seed)
    z = rng.choice([-np.inf, -2.5, -0.0, 0.0, 3.5][:distinct], (3, width))
    token = sampler.sample_greedy(jnp.array(z, jnp.float32))
    assert np.array_equal(token, z.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, V), st.integers(0, 1000))
def test_top_k_keeps_exactly_the_k_largest(k, seed):
    z = _logits(2, seed)
    kept = np.asarray(sampler.keep_top_k(jnp.array(z), jnp.array([k, k])))
    threshold = np.sort(z, axis=1)[:, -k][:, None]
    assert np.array_equal(kept, z >= threshold)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 0.99), st.integers(0, 1000))
def test_top_p_keeps_the_smallest_set_with_that_mass(p, seed):
    z = _logits(2, seed)
    kept = np.asarray(sampler.keep_top_p(jnp.array(z), jnp.array([p, p], jnp.float32)))
    for row, keep in zip(z.astype(np.float64), kept, strict=True):
        probs = np.exp(row - row.max())
        probs /= probs.sum()
        mass = probs[keep].sum()
        assert mass >= p - 1e-5
        assert mass - probs[keep].min() < p + 1e-5
        assert row[keep].min() > row[~keep].max() if (~keep).any() else True


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 1.0, width=32, allow_subnormal=False), st.integers(0, 1000))
def test_min_p_keeps_what_is_likely_enough(p, seed):
    z, p = _logits(2, seed), np.float32(p)
    z[0, :7] = -np.inf
    kept = np.asarray(sampler.keep_min_p(jnp.array(z), jnp.array([p, p], jnp.float32)))
    ratio = np.exp(z.astype(np.float64) - z.max(1, keepdims=True))
    assert kept[ratio >= p * (1 + 1e-5)].all()
    assert not kept[ratio < p * (1 - 1e-5)].any()


def test_negative_and_zero_logits_are_ordered_by_the_threshold_search():
    z = np.array([[-3.0, 0.0, -0.0, 2.0, -1.0]], np.float32)
    kept = np.asarray(sampler.keep_top_k(jnp.array(z), jnp.array([4])))
    assert kept.tolist() == [[False, True, True, True, True]]


def test_unused_filters_are_exact_no_ops_beside_rows_that_use_them():
    z = _logits(4)
    alone = _draw(z[:1], seed=7)
    mixed = sampler.sample_tokens(
        jnp.array(z),
        seed_B2=jnp.array([[7, 0]] * 4, jnp.uint32),
        position_B=jnp.full(4, 3, jnp.int32),
        temperature_B=jnp.array([1.0, 0.0, 0.5, 2.0], jnp.float32),
        top_k_B=jnp.array([0, 0, 3, 0], jnp.int32),
        top_p_B=jnp.array([1.0, 1.0, 1.0, 0.3], jnp.float32),
        min_p_B=jnp.array([0.0, 0.2, 0.0, 0.1], jnp.float32),
    )
    assert int(mixed[0]) == alone[0]
    assert int(mixed[1]) == z[1].argmax()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_follow_the_softmax(temperature):
    """Chi-square over 20,000 draws; 99.9 % quantile for 7 degrees is 24.3."""
    z = np.array([1.5, 0.5, 0.0, -0.5, 1.0, -1.0, 0.2, 0.7], np.float32)
    count = 20000
    tokens = sampler.sample_tokens(
        jnp.broadcast_to(jnp.array(z), (count, 8)),
        seed_B2=jnp.broadcast_to(jnp.array([42, 9], jnp.uint32), (count, 2)),
        position_B=jnp.arange(count, dtype=jnp.int32),
        temperature_B=jnp.full(count, temperature, jnp.float32),
        top_k_B=jnp.zeros(count, jnp.int32),
        top_p_B=jnp.ones(count, jnp.float32),
        min_p_B=jnp.zeros(count, jnp.float32),
    )
    expected = np.exp(z / temperature) / np.exp(z / temperature).sum() * count
    seen = np.bincount(np.asarray(tokens), minlength=8)
    assert ((seen - expected) ** 2 / expected).sum() < 24.3


def test_seeds_and_positions_give_unrelated_noise():
    first = np.asarray(
        sampler.gumbel_noise(
            jnp.array([[1, 0], [2, 0], [1, 1], [1, 0]], jnp.uint32),
            jnp.array([0, 0, 0, 1], jnp.int32),
            50000,
        )
    )
    assert np.isfinite(first).all()
    correlation = np.corrcoef(first) - np.eye(4)
    assert np.abs(correlation).max() < 0.02
    # Mean and deviation of Gumbel(0, 1): Euler's constant, pi / sqrt(6).
    assert np.abs(first.mean(1) - 0.5772).max() < 0.03
    assert np.abs(first.std(1) - 1.2825).max() < 0.03


def test_logprobs_are_those_of_the_raw_logits():
    z = _logits(3)
    token = jnp.array([3, 10, 60])
    chosen, rank, ids, top = map(
        np.asarray, sampler.token_logprobs(jnp.array(z), token, 5)
    )
    truth = z - np.log(np.exp(z.astype(np.float64)).sum(1, keepdims=True))
    assert np.allclose(chosen, truth[np.arange(3), np.asarray(token)], atol=1e-5)
    order = np.argsort(-z, axis=1)
    assert ids.tolist() == order[:, :5].tolist()
    assert np.allclose(top, np.take_along_axis(truth, order[:, :5], 1), atol=1e-5)
    for row in range(3):
        assert order[row, rank[row] - 1] == int(token[row])


def test_top_p_that_underflows_keeps_the_likeliest():
    z = _logits(2)
    kept = sampler.keep_top_p(jnp.array(z), jnp.array([1e-44, 1e-30], jnp.float32))
    assert np.array_equal(kept, z == z.max(-1, keepdims=True))


def test_fewer_tokens_than_logprobs_asked_gives_all_of_them():
    z = jnp.array(_logits(2)[:, :5])
    token = jnp.array([1, 2], jnp.int32)
    ids, values = sampler.token_logprobs(z, token, 20)[2:]
    assert ids.shape == values.shape == (2, 5)
