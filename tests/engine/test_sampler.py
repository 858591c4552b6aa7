"""The sampler against sorted-vocabulary truths, and its promises on bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import sampler, thresholds

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


def test_top_p_that_underflows_keeps_the_likeliest():
    z = _logits(2)
    kept = sampler.keep_top_p(jnp.array(z), jnp.array([1e-44, 1e-30], jnp.float32))
    assert np.array_equal(kept, z == z.max(-1, keepdims=True))


def _rows_of_all_kinds(seed):
    """Ties, both zeros, -inf, wide and narrow rows, and one with a single number."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, scale, 300) for scale in (0.01, 2.0, 30.0)]
    rows += [rng.choice([-np.inf, -2.5, -0.0, 0.0, 3.5], 300) for _ in range(3)]
    rows += [np.zeros(300), np.full(300, -np.inf), rng.normal(0, 1, 300) * 1e30]
    rows[-2][7] = 1.5
    rows[0][50:] = -np.inf
    rows[-1][3] = 1.0
    return jnp.array(np.stack(rows), jnp.float32)


@pytest.mark.parametrize("k", [1, 2, 50, 299, 300, 1000])
def test_both_searches_for_the_kth_largest_keep_the_same(k):
    z_BV = _rows_of_all_kinds(k)
    k_B1 = jnp.full((z_BV.shape[0], 1), k, jnp.int32)
    digits = jax.jit(thresholds.top_k_by_digits)(z_BV, k_B1)
    halving = jax.jit(thresholds.top_k_by_halving)(z_BV, k_B1)
    assert np.array_equal(digits, halving)
    kth = -np.sort(-np.asarray(z_BV), axis=1)[:, [min(k, 300) - 1]]
    assert np.array_equal(halving, z_BV >= kth)


@pytest.mark.parametrize("p", [1e-44, 0.05, 0.5, 0.9, 0.999, 1.0])
def test_both_ways_to_the_best_token_in_top_p_find_the_same(p):
    z_BV = _rows_of_all_kinds(3)
    noise_BV = np.random.default_rng(1).gumbel(size=(40, *z_BV.shape))
    p_B = jnp.full(z_BV.shape[0], p, jnp.float32)
    trial = jax.jit(sampler.best_by_trial)
    threshold = jax.jit(sampler.best_by_threshold)
    for noise in noise_BV:
        score_BV = z_BV + jnp.array(noise, jnp.float32)
        expected = threshold(z_BV, score_BV, p_B)
        assert np.array_equal(trial(z_BV, score_BV, p_B), expected)


def test_rows_that_are_not_numbers_end_every_search():
    z_BV = jnp.array([[1.0, jnp.nan, 0.5], [jnp.nan] * 3, [jnp.inf, 1.0, jnp.inf]])
    k_B1 = jnp.ones((3, 1), jnp.int32)
    p_B = jnp.full(3, 0.5)
    assert jax.jit(thresholds.top_k_by_halving)(z_BV, k_B1).shape == z_BV.shape
    assert jax.jit(sampler.best_by_trial)(z_BV, z_BV, p_B).shape == (3,)


def test_top_p_takes_the_same_token_alone_and_among_others():
    """A sum over few rows rounded otherwise, so a token on the edge could differ."""
    z = np.random.default_rng(4).normal(0, 1, (16, 512)).astype(np.float32)
    rows, counts = 16, (1, 2, 3, 8)
    p_B = np.linspace(0.2, 0.9, rows, dtype=np.float32)
    keep = jax.jit(sampler.keep_top_p)
    weights = jax.jit(lambda z, p: sampler._top_p_weights(z, p)[1])
    expected = np.asarray(keep(z, p_B)), np.asarray(weights(z, p_B[:, None]))
    for count in counts:
        for first in range(0, rows - count + 1, count):
            some = slice(first, first + count)
            assert np.array_equal(keep(z[some], p_B[some]), expected[0][some])
            alone = weights(z[some], p_B[some][:, None])
            assert np.array_equal(alone, expected[1][some])


def test_both_zeros_tie_in_a_compiled_search():
    """Adding 0.0 to tell -0.0 from nothing was dropped by the compiler."""
    z = jnp.array([[-0.0, 0.0, -1.0, 0.0]], jnp.float32)
    kept = jax.jit(sampler.keep_top_k)(z, jnp.array([1]))
    assert kept.tolist() == [[True, True, False, True]]


def test_greedy_rows_are_the_same_with_and_without_a_row_that_draws():
    z = _logits(3)
    z[0, [5, 9]] = 9.0
    both = sampler.sample_tokens(
        jnp.array(z),
        seed_B2=jnp.ones((3, 2), jnp.uint32),
        position_B=jnp.zeros(3, jnp.int32),
        temperature_B=jnp.array([0.0, 0.0, 1.0], jnp.float32),
        top_k_B=jnp.array([0, 2, 3], jnp.int32),
        top_p_B=jnp.array([0.4, 1.0, 0.3], jnp.float32),
        min_p_B=jnp.zeros(3, jnp.float32),
    )
    assert both[:2].tolist() == _draw(z[:2], temperature=0.0).tolist()
    assert both[:2].tolist() == z[:2].argmax(-1).tolist()


@pytest.mark.parametrize("k", [1, 2, 62, 63, 64, 65, 1000])
def test_search_in_the_best_blocks_keeps_what_a_sort_keeps(k):
    """From k = 64 on all of the row is searched."""
    rng = np.random.default_rng(k)
    z = np.stack(
        [
            rng.standard_normal(20000),
            rng.integers(0, 40, 20000),  # ties in every block
            np.where(np.arange(20000) % 128 == 5, 7.0, rng.random(20000)),
            np.sort(rng.random(20000))[::-1],  # all of the largest in one block
            np.where(np.arange(20000) < 40, 1.0, -np.inf),
        ]
    ).astype(np.float32)
    limit = jnp.full(len(z), k, jnp.int32)
    kept = np.asarray(jax.jit(sampler.keep_top_k)(jnp.array(z), limit))
    least = np.sort(z, axis=1)[:, -k]
    assert (kept[:4] == (z >= least[:, None])[:4]).all()
    assert kept[4, :40].all()
