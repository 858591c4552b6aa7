"""The sampler at a real vocabulary's size against numpy in float64, filters together.

What each filter keeps is a prefix of the ids in order of their logits, so all of them
together keep the shortest of the prefixes. The reference gives its length as an
interval: (least, most) as rounding allows. Tolerances: a scaled logit is off by 2**-22
of itself, a mass by 2e-5 of itself (150,000 float32 addends), beside what the error of
the logits makes of it.
"""

import functools
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from headrace.engine import sampler

V, B = 150_000, 6
LOGIT_ERROR, MASS_ERROR, NOISE_ERROR = 2.0**-22, 2e-5, 2.0**-18
TINY = 1e-37  # about here float32 has no normal numbers any more

KINDS = {
    "model-like": lambda rng: rng.normal(0, 3, V),
    "peaked": lambda rng: rng.normal(0, 1, V) + 18 * (rng.random(V) < 1e-4),
    "ties": lambda rng: np.round(rng.normal(0, 4, V)),
    "half forbidden": lambda rng: np.where(
        rng.random(V) < 0.5, -np.inf, rng.normal(0, 3, V)
    ),
    "three allowed": lambda rng: np.where(
        np.isin(np.arange(V), rng.integers(0, V, 3)), rng.normal(0, 1, V), -np.inf
    ),
    "one-hot": lambda rng: np.where(np.arange(V) == rng.integers(V), 0.0, -np.inf),
    "one tall": lambda rng: np.where(np.arange(V) == rng.integers(V), 14.0, 0.0),
    "flat": lambda rng: np.full(V, -7.5),
    "tiny range": lambda rng: 1e-6 * rng.normal(0, 1, V),
    "tiny numbers": lambda rng: 1e-30 * rng.normal(0, 1, V),
    "huge range": lambda rng: 1e30 * rng.normal(0, 1, V),
    "far from zero": lambda rng: 1e4 + rng.normal(0, 3, V),
}
OFF = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
TYPES = dict(temperature=np.float32, top_k=np.int32, top_p=np.float32, min_p=np.float32)

ROW = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(list(KINDS)),
        "temperature": st.sampled_from([0.0, 1.0])
        | st.sampled_from([0.01, 0.25, 0.7, 1.3, 100.0])
        | st.floats(0.01, 100),
        "top_k": st.just(0)
        | st.sampled_from([1, 2, 40, V - 1, V, V + 1, 2**31 - 1])
        | st.integers(1, 2000),
        "top_p": st.just(1.0)
        | st.sampled_from([1e-44, 1e-6, 0.5, 0.95, 1 - 2**-20])
        | st.floats(0.01, 0.99),
        "min_p": st.just(0.0)
        | st.sampled_from([1e-37, 1e-6, 0.05, 1.0])
        | st.floats(1e-3, 1),
    }
)


@functools.cache
def logits_of(kind, seed):
    return KINDS[kind](np.random.default_rng(seed)).astype(np.float32)


def arrays(rows):
    """The rows' parameters under the names that the sampler has for them."""
    return {
        f"{name}_B": jnp.array([row[name] for row in rows], dtype)
        for name, dtype in TYPES.items()
    }


def counters(seed):
    rng = np.random.default_rng(seed)
    seed_B2 = rng.integers(0, 2**32, (B, 2), np.uint32)
    return seed_B2, rng.integers(0, 2**20, B, np.int32)


@jax.jit
def sample(z_BV, seed_B2, position_B, params):
    return sampler.sample_tokens(z_BV, seed_B2=seed_B2, position_B=position_B, **params)


@jax.jit
def sample_lifted(z_BV, id_B2, height_B, params):
    """Samples with two ids lifted and no other noise, by the height and by twice it.

    NOTE: with a row more than elsewhere. JAX keeps what it traced by shape, noise too.
    """

    def lift(id_B2, height_B, _):
        times_BV = (jnp.arange(V)[:, None] == id_B2[:, None]) @ jnp.array([1.0, 2.0])
        return times_BV * jax.lax.bitcast_convert_type(height_B, jnp.float32)[:, None]

    bits_B = jax.lax.bitcast_convert_type(height_B, jnp.int32)
    with mock.patch.object(sampler, "gumbel_noise", lift):
        return sampler.sample_tokens(z_BV, seed_B2=id_B2, position_B=bits_B, **params)


def mix(h):
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
    return h ^ (h >> 16)


def noise_of(seed, position):
    """One row of `gumbel_noise`, written again: 64-bit integers, float64 logarithms."""
    low, high, position = int(seed[0]), int(seed[1]), int(position)
    a = mix(low ^ mix((position + 0x9E3779B9) % 2**32))
    b = mix((high + mix(position ^ 0x7F4A7C15) + a) % 2**32)
    token = np.arange(V, dtype=np.uint64) * np.uint64(0x9E3779B1) + np.uint64(a)
    h = mix(mix(token % np.uint64(2**32)) ^ np.uint64(b))
    return -np.log(-np.log1p(-((h >> np.uint64(9)) + 0.5) * 2.0**-23))


class Kept:
    """The ids in order, and how many of them the filters keep: [least, most]."""

    def __init__(self, z, row):
        t = np.float64(np.float32(row["temperature"]))
        self.scaled = z.astype(np.float64) / (t or 1)
        self.order = np.argsort(-self.scaled, kind="stable")
        self.falling = -self.scaled[self.order]  # rises, for searchsorted
        finite = self.count(np.finfo(np.float64).min)
        counts = [(finite, finite), self._min_p(row["min_p"]), self._top_k(row)]
        self.least, self.most = np.min(counts, axis=0)
        if np.float32(row["top_p"]) < 1:
            self._cut_top_p(np.float64(np.float32(row["top_p"])))

    def count(self, value):
        """How many are at least `value`."""
        return int(np.searchsorted(self.falling, -value, side="right"))

    @staticmethod
    def error(value):
        return LOGIT_ERROR * abs(value) + TINY

    def _min_p(self, p):
        if p == 0:
            return V, V
        top, drop = -self.falling[0], np.log(np.float64(np.float32(p)))
        slack = self.error(top) + self.error(drop)
        surely = min(top, top + drop + slack)  # the likeliest is at least itself
        return self.count(surely), self.count(top + drop - slack)

    def _top_k(self, row):
        if not 0 < row["top_k"] < V:
            return V, V
        value = -self.falling[row["top_k"] - 1]
        # Division may make equal what was not, but turns no order round.
        return self.count(value), self.count(value - self.error(value))

    def _cut_top_p(self, p):
        top = -self.falling[0]
        mass = np.exp(np.maximum(-self.falling[: self.most] - top, -800)).cumsum()
        error = MASS_ERROR + np.expm1(min(2 * self.error(top), 1))
        need = p * mass[self.least - 1] * (1 - error), p * mass[-1] * (1 + error)
        ends = np.minimum(np.searchsorted(mass, need), self.most - 1)
        low, high = (-self.falling[end] for end in ends)
        self.least = min(self.least, self.count(low))
        self.most = min(self.most, self.count(high - self.error(high)))


def token_and_rivals(z, row, noise):
    """The token of the surely kept ids, and every id that rounding may put in front."""
    if row["temperature"] == 0:
        return int(z.argmax()), set()
    kept = Kept(z, row)
    ids = kept.order[: kept.most]
    score = kept.scaled[ids] + noise[ids]
    best = int(score[: kept.least].argmax())
    error = Kept.error(kept.scaled[ids]) + NOISE_ERROR
    rivals = score + error >= score[best] - error[best]
    return int(ids[best]), {int(i) for i in ids[rivals]} - {int(ids[best])}


def test_any_combination_gives_the_token_of_numpy():
    certain = []

    @hypothesis.settings(max_examples=24, deadline=None)
    @hypothesis.given(st.lists(ROW, min_size=B, max_size=B), st.integers(0, 2**16))
    def check(rows, seed):
        z_BV = np.stack([logits_of(row["kind"], i) for i, row in enumerate(rows)])
        seed_B2, position_B = counters(seed)
        tokens = np.asarray(sample(z_BV, seed_B2, position_B, arrays(rows)))
        for i, row in enumerate(rows):
            noise = noise_of(seed_B2[i], position_B[i])
            token, rivals = token_and_rivals(z_BV[i], row, noise)
            assert tokens[i] == token or tokens[i] in rivals, row
            certain.append(not rivals)

    check()
    print(f"{sum(certain)} of {len(certain)} rows leave one token")
    assert np.mean(certain) > 0.8


def border(kept):
    """(ids, height): the last one kept and the first one dropped, V where all are kept.

    Lifted, the second comes before the first, and the first before all others: it is
    sampled if both sides of the border are right, and another if not.
    """
    ids = [kept.order[kept.least - 1], *kept.order[kept.most :], V]
    sizes = np.abs(kept.scaled[[kept.order[0], *(i for i in ids[:2] if i < V)]])
    return ids[:2], 4 * (1 + sizes[np.isfinite(sizes)].max())


def test_any_combination_keeps_the_ids_of_numpy():
    certain = []

    @hypothesis.settings(max_examples=24, deadline=None)
    @hypothesis.given(st.lists(ROW, min_size=B + 1, max_size=B + 1))
    def check(rows):
        rows = [row | {"temperature": row["temperature"] or 1.0} for row in rows]
        z_BV = np.stack([logits_of(row["kind"], i) for i, row in enumerate(rows)])
        kepts = [Kept(z, row) for z, row in zip(z_BV, rows, strict=True)]
        ids, heights = zip(*map(border, kepts), strict=True)
        tokens = sample_lifted(
            z_BV, np.array(ids, np.uint32), np.array(heights, np.float32), arrays(rows)
        )
        for row, token, (last, _), kept in zip(rows, tokens, ids, kepts, strict=True):
            assert token == last, (row, kept.least, kept.most)
            certain.append(kept.most - kept.least <= kept.least // 1000)

    check()
    print(f"{sum(certain)} of {len(certain)} rows know their ids to 0.1 %")
    assert np.mean(certain) > 0.8


FILTERS = {
    "top_k": (sampler.keep_top_k, [1, 2, 3000, V // 2, V - 1, V]),
    "top_p": (sampler.keep_top_p, [1e-6, 0.1, 0.5, 0.9, 0.99, 1 - 2**-20]),
    "min_p": (sampler.keep_min_p, [1e-30, 1e-6, 0.01, 0.1, 0.9, 1.0]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILTERS)
def test_filter_alone_keeps_the_ids_of_numpy(name, kind):
    keep, values = FILTERS[name]
    z = logits_of(kind, 99)
    z_BV = jnp.broadcast_to(jnp.array(z), (B, V))
    masks = np.asarray(jax.jit(keep)(z_BV, jnp.array(values, TYPES[name])))
    for value, mask in zip(values, masks, strict=True):
        kept = Kept(z, OFF | {name: value})
        mask = mask & np.isfinite(z)
        assert mask[kept.order[: kept.least]].all(), value
        assert not mask[kept.order[kept.most :]].any(), value
        assert not (~mask).any() or z[mask].min() > z[~mask].max(), "no prefix"
        if name == "top_k":  # integers and comparisons: no tolerance
            assert np.array_equal(mask, np.isfinite(z) & (z >= np.sort(z)[V - value]))


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_filter_that_is_off_keeps_every_id_beside_rows_where_it_is_on(name):
    keep, (_, on, *_) = FILTERS[name]
    keep = jax.jit(keep)
    offs = [0, -1, V, V + 1, 2**31 - 1, 0] if name == "top_k" else [OFF[name]] * B
    mixed = [offs[0], on, offs[2], on, offs[4], offs[1]]
    for kinds in np.array(list(KINDS)).reshape(-1, B):
        z_BV = jnp.array(np.stack([logits_of(kind, 5) for kind in kinds]))
        assert np.asarray(keep(z_BV, jnp.array(offs, TYPES[name]))).all()
        mask = np.asarray(keep(z_BV, jnp.array(mixed, TYPES[name])))
        assert mask[[0, 2, 4, 5]].all()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_parameter_that_is_off_changes_no_token_beside_rows_where_it_is_on(name):
    """Nor does the search that other rows ask for, when all else is off as well."""
    ons = dict(temperature=0.3, top_k=3, top_p=0.2, min_p=0.5)
    for seed, kinds in enumerate(np.array(list(KINDS)).reshape(-1, B)):
        z_BV = jnp.array(np.stack([logits_of(kind, 5) for kind in kinds]))
        seed_B2, position_B = counters(seed)
        noise_BV = sampler.gumbel_noise(jnp.array(seed_B2), jnp.array(position_B), V)
        plain = np.asarray(sampler.sample_greedy(z_BV + noise_BV))
        off = [OFF] * B
        assert np.array_equal(sample(z_BV, seed_B2, position_B, arrays(off)), plain)
        mixed = [OFF, OFF | {name: ons[name]}] * (B // 2)
        got = np.asarray(sample(z_BV, seed_B2, position_B, arrays(mixed)))
        assert np.array_equal(got[::2], plain[::2])


def test_noise_is_that_of_numpy():
    seed_B2, position_B = counters(1)
    seed_B2[0], position_B[0] = 0, 0
    seed_B2[1], position_B[1] = 2**32 - 1, 2**31 - 1
    got = np.asarray(
        sampler.gumbel_noise(jnp.array(seed_B2), jnp.array(position_B), V), np.float64
    )
    wanted = [noise_of(s, p) for s, p in zip(seed_B2, position_B, strict=True)]
    error = np.abs(got - wanted)
    print(f"largest error {error.max():.1e}")
    assert error.max() < NOISE_ERROR / 2
