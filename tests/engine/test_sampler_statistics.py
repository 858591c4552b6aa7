"""Samples and the noise behind them against exact probabilities, by chi-square.

All seeds are fixed, so nothing here fails by chance in a later run. Critical values are
literals at the level 1e-4 (one right sampler in 10,000 would be refused); the tests of
power show what the same statistics refuse.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.engine import sampler

V, DRAWS = 50, 20000
LOGITS = np.random.default_rng(11).normal(0, 1.5, V).astype(np.float32)

# Degrees of freedom to the quantile of chi-square that 1e-4 exceed.
CRITICAL = {9: 33.7, 15: 44.3, 18: 49.2, 31: 69.1, 43: 86.3, 49: 94.6}
CRITICAL |= {99: 160.1, 255: 347.7}

OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
CASES = {
    "plain": {},
    "cold": dict(temperature=0.6),
    "hot": dict(temperature=1.8),
    "top_k": dict(top_k=10),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.05),
    "jointly": dict(temperature=1.3, top_k=24, top_p=0.9, min_p=0.02),
}


def exact_probabilities(*, temperature, top_k, top_p, min_p):
    """What the parameters mean, in float64; the logits have no ties."""
    scaled = LOGITS.astype(np.float64) / temperature
    order = np.argsort(-scaled)
    weight = np.exp(scaled - scaled.max())[order]
    count = min((weight >= min_p).sum(), top_k or V)
    mass = weight[:count].cumsum() / weight[:count].sum()
    if top_p < 1:
        count = np.searchsorted(mass, top_p) + 1
    probabilities = np.zeros(V)
    probabilities[order[:count]] = weight[:count] / weight[:count].sum()
    return probabilities


def counters(along):
    """(seed_B2, position_B) of 20,000 draws: one counter runs, the others stand."""
    index = np.arange(DRAWS, dtype=np.uint32)
    seed = np.full((DRAWS, 2), [123, 456], np.uint32)
    position = np.full(DRAWS, 77, np.int32)
    if along == "position":
        position = index.astype(np.int32)
    else:
        seed[:, ("low", "high").index(along)] = index
    return jnp.array(seed), jnp.array(position)


def draw(along, *, temperature, top_k, top_p, min_p):
    """How often each id was drawn in 20,000."""
    seed_B2, position_B = counters(along)
    tokens = jax.jit(sampler.sample_tokens)(
        jnp.broadcast_to(jnp.array(LOGITS), (DRAWS, V)),
        seed_B2=seed_B2,
        position_B=position_B,
        temperature_B=jnp.full(DRAWS, temperature, jnp.float32),
        top_k_B=jnp.full(DRAWS, top_k, jnp.int32),
        top_p_B=jnp.full(DRAWS, top_p, jnp.float32),
        min_p_B=jnp.full(DRAWS, min_p, jnp.float32),
    )
    return np.bincount(np.asarray(tokens), minlength=V)


def pooled(seen, expected):
    """Cells that expect fewer than 5 are one cell: chi-square needs so many."""
    rare = expected < 5
    if not rare.any():
        return seen, expected
    return tuple(np.append(x[~rare], x[rare].sum()) for x in (seen, expected))


def chi_square(seen, expected):
    """(statistic, its critical value)."""
    seen, expected = pooled(seen, expected)
    statistic = ((seen - expected) ** 2 / expected).sum()
    return statistic, CRITICAL[len(expected) - 1]


def chi_square_of_kept(seen, probabilities):
    """The same over the kept ids; infinite where another id was drawn."""
    kept = probabilities > 0
    statistic, critical = chi_square(seen[kept], probabilities[kept] * DRAWS)
    return np.inf if seen[~kept].any() else statistic, critical


@pytest.mark.parametrize("along", ["low", "high", "position"])
@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_exact_probabilities(case, along):
    params = OFF | CASES[case]
    seen = draw(along, **params)
    statistic, critical = chi_square_of_kept(seen, exact_probabilities(**params))
    print(f"{case}, {along}: {statistic:.1f} of {critical}, {(seen > 0).sum()} ids")
    assert statistic < critical


@pytest.mark.parametrize(
    ("drawn", "claimed"),
    [
        (dict(temperature=1.0), dict(temperature=1.08)),
        (dict(temperature=0.65), dict(temperature=0.6)),
        (dict(top_k=11), dict(top_k=10)),
        (dict(top_k=9), dict(top_k=10)),
        (dict(top_p=0.82), dict(top_p=0.8)),
        (dict(top_p=0.78), dict(top_p=0.8)),
        (dict(min_p=0.06), dict(min_p=0.05)),
    ],
)
def test_statistic_refuses_what_another_parameter_draws(drawn, claimed):
    """The power of the test above: eight per cent of temperature, or one id."""
    seen = draw("position", **OFF | drawn)
    probabilities = exact_probabilities(**OFF | claimed)
    statistic, critical = chi_square_of_kept(seen, probabilities)
    print(f"{drawn} against {claimed}: {statistic:.1f}, refused above {critical}")
    assert statistic > critical


@functools.cache
def _noise_program(width):
    return jax.jit(functools.partial(sampler.gumbel_noise, vocab_size=width))


def uniforms(low, high, position, width):
    """The noise of each row, transformed back to what must be uniform in (0, 1)."""
    low, high, position = np.broadcast_arrays(low, high, position)
    seed_B2 = np.stack([low, high], axis=-1).astype(np.uint32).reshape(-1, 2)
    noise = _noise_program(width)(
        jnp.array(seed_B2), jnp.array(position.astype(np.int32).reshape(-1))
    )
    return -np.expm1(-np.exp(-np.asarray(noise, np.float64)))


def test_noise_is_uniform_after_the_inverse_transform():
    u = uniforms(7, 0, np.arange(64), 2**14).ravel()
    seen = np.histogram(u, bins=100, range=(0, 1))[0]
    statistic, critical = chi_square(seen, np.full(100, len(u) / 100))
    print(f"100 bins: {statistic:.1f} of {critical}")
    assert statistic < critical


@pytest.mark.parametrize("is_upper", [False, True])
def test_tails_of_the_noise_are_as_thin_as_they_should_be(is_upper):
    """Cells [1/2, 1), [1/4, 1/2) .. of 2**20 numbers, down to 2**-15 and the rest."""
    u = uniforms(7, 9, np.arange(64), 2**14).ravel()
    u = 1 - u if is_upper else u
    seen = np.bincount(np.minimum(np.floor(-np.log2(u)), 15).astype(int), minlength=16)
    expected = len(u) * 0.5 ** np.array([*range(1, 16), 15])
    statistic, critical = chi_square(seen, expected)
    print(f"tail: {statistic:.1f} of {critical}, extreme {u.min() * len(u):.2f} / n")
    assert statistic < critical
    # The least of n uniforms is 1 / n on average; 12 times that has the chance e**-12.
    assert 0 < u.min() * len(u) < 12


def test_noise_stays_between_its_least_and_its_largest():
    """23 bits and a half: 2**-24 and 1 - 2**-24 give -ln(ln 2**24) and ln 2**24."""
    noise = np.asarray(
        _noise_program(2**16)(jnp.zeros((64, 2), jnp.uint32), jnp.arange(64))
    )
    assert np.isfinite(noise).all()
    assert -2.8117 < noise.min() < -2.5 and 13 < noise.max() < 16.636


# Two families of rows each, alike but for one counter, which differs as named.
LAGS = {
    "positions next to each other": lambda i: ((5, 6, 2 * i), (5, 6, 2 * i + 1)),
    "positions 1024 apart": lambda i: ((5, 6, i), (5, 6, i + 1024)),
    "seeds next to each other": lambda i: ((2 * i, 0, 3), (2 * i + 1, 0, 3)),
    "seeds 65536 apart": lambda i: ((i, 0, 3), (i + 65536, 0, 3)),
    "high words next to each other": lambda i: ((4, 2 * i, 3), (4, 2 * i + 1, 3)),
    "high words 2**31 apart": lambda i: ((4, i, 3), (4, i + 2**31, 3)),
    "seed and position exchanged": lambda i: ((i, 0, i + 999), (i + 999, 0, i)),
    "words of the seed exchanged": lambda i: ((i, i + 999, 3), (i + 999, i, 3)),
    "seed up, position down": lambda i: ((i, 0, 1000 - i), (i + 1, 0, 999 - i)),
    "high word as low word": lambda i: ((i + 1, 0, 3), (0, i + 1, 3)),
}


def check_unrelated(u, v):
    """Correlation, and pairs on a grid of 16 by 16 that must be equally full."""
    n = u.size
    correlation = np.corrcoef(u.ravel(), v.ravel())[0, 1]
    cells = np.floor(u * 16).astype(int) * 16 + np.floor(v * 16).astype(int)
    seen = np.bincount(cells.ravel(), minlength=256)
    statistic, critical = chi_square(seen, np.full(256, n / 256))
    print(f"r {correlation:+.5f}, grid {statistic:.1f} of {critical}, {n} pairs")
    # 3.89 deviations: two-sided, the same level 1e-4.
    assert abs(correlation) < 3.89 / np.sqrt(n)
    assert statistic < critical


@pytest.mark.parametrize("name", LAGS)
def test_neighbouring_counters_give_unrelated_noise(name):
    first, second = LAGS[name](np.arange(512, dtype=np.int64))
    check_unrelated(uniforms(*first, 512), uniforms(*second, 512))


@pytest.mark.parametrize("stride", [1, 2, 128, 4096, 65536])
def test_neighbouring_token_ids_have_unrelated_noise(stride):
    u = uniforms(5, 6, np.arange(4), 131072).reshape(4, -1, 2, stride)
    check_unrelated(u[:, :, 0], u[:, :, 1])


@pytest.mark.parametrize("word", ["low", "high"])
def test_seeds_that_differ_in_one_bit_have_unrelated_noise(word):
    """All 32 bits together, so that each has its share of the pairs."""
    flipped = 0x9ABCDEF0 ^ (1 << np.arange(32, dtype=np.int64))
    seeds = (flipped, 1) if word == "low" else (1, flipped)
    base = (0x9ABCDEF0, 1) if word == "low" else (1, 0x9ABCDEF0)
    u, v = uniforms(*base, 8, 8192), uniforms(*seeds, 8, 8192)
    correlation = [np.corrcoef(u[0], row)[0, 1] for row in v]
    print(f"largest |r| of 32: {np.abs(correlation).max():.4f}")
    # 4.66 deviations: 1e-4 shared by 32 correlations.
    assert np.abs(correlation).max() < 4.66 / np.sqrt(8192)
    other = np.roll(v, 1, axis=0)  # two seeds that differ in two bits
    check_unrelated(v[::2], other[::2])


def test_no_seed_and_position_of_a_grid_share_a_row():
    """2**18 rows: with a state of 32 bits and not 64 some 8 pairs would be alike."""
    seed, position = np.meshgrid(np.arange(512), np.arange(512))
    for low, high in ((seed, 0), (0, seed), (seed, position[::-1])):
        rows = uniforms(low, high, position, 4)
        assert len(np.unique(rows, axis=0)) == 512 * 512
