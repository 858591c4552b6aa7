"""Rejection keeps the distribution; coupled drafts are as right as they can be.

Target and draft are tables: the next token's logits by the last token. All else is the
engine's own: drafts are drawn by `draw_draft`, tokens by `sample`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from headrace.engine import rejection, sample_step
from headrace.engine.draft_sampling import draw_draft
from headrace.engine.drafting import empty_drafting
from headrace.engine.packed_layout import PackedLayout
from headrace.engine.processors import empty_extras
from headrace.engine.slots import empty_slots

V, K, ROWS, BATCHES, PLACES = 5, 2, 40_000, 5, 3
LAYOUT = PackedLayout(
    num_slots=ROWS, page_size=16, max_rows=1, max_stop_ids=1, pages_per_request=1,
    max_tokens=1, max_context_len=16, num_drafts=K,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Tables [V, V] of logits, and the parameters of all rows."""

    target: np.ndarray
    draft: np.ndarray
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency: float = 0.0
    bias: np.ndarray | None = None

    @classmethod
    def random(cls, seed):
        rng = np.random.default_rng(seed)
        target = rng.standard_normal((V, V)) * 1.5
        draft = target + rng.standard_normal((V, V)) * rng.choice([0.3, 1.0, 2.0])
        has_extras = seed % 2
        return cls(
            target=target.astype(np.float32),
            draft=draft.astype(np.float32),
            temperature=float(rng.uniform(0.3, 1.8)),
            top_k=int(rng.choice([0, 2, 3, 4])),
            top_p=float(rng.choice([1.0, 0.9, 0.6])),
            min_p=float(rng.choice([0.0, 0.05, 0.2])),
            frequency=float(rng.uniform(0.1, 0.8)) if has_extras else 0.0,
            bias=rng.standard_normal(V).astype(np.float32) if has_extras else None,
        )

    def probabilities(self, logits, count):
        """What a token is drawn from, in float64 from the definitions."""
        z = logits.astype(np.float64) - self.frequency * count
        z = (z + (0 if self.bias is None else self.bias)) / self.temperature
        z = np.where(z >= z.max() + np.log(max(self.min_p, 1e-300)), z, -np.inf)
        if self.top_k:
            z = np.where(z >= np.sort(z)[-self.top_k], z, -np.inf)
        p = np.exp(z - z.max())
        p /= p.sum()
        order = np.argsort(-p)
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= self.top_p]] = 0
        return p / p.sum()

    def joint(self):
        """Of the first three tokens, [V, V, V]."""
        found, eye = np.zeros((V, V, V)), np.eye(V)
        first = self.probabilities(self.target[0], np.zeros(V))
        for a in range(V):
            second = self.probabilities(self.target[a], eye[a])
            for b in range(V):
                third = self.probabilities(self.target[b], eye[a] + eye[b])
                found[a, b] = first[a] * second[b] * third
        return found


def start(case, seed):
    """Slots, extras and drafting of rows whose last token is 0."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (ROWS, 2), dtype=np.uint32)
    full = functools.partial(jnp.full, ROWS)
    slots = dataclasses.replace(
        empty_slots(LAYOUT),
        active_B=full(True),
        remaining_B=full(1000),
        seed_B2=jnp.asarray(words),
        temperature_B=full(jnp.float32(case.temperature)),
        top_k_B=full(case.top_k),
        top_p_B=full(jnp.float32(case.top_p)),
        min_p_B=full(jnp.float32(case.min_p)),
        has_extras_B=full(case.bias is not None),
        frequency_B=full(jnp.float32(case.frequency)),
        max_drafts_B=full(K),
    )
    extras = empty_extras(ROWS, V, 1)
    if case.bias is not None:
        bias_BV = jnp.broadcast_to(jnp.asarray(case.bias), (ROWS, V))
        extras = dataclasses.replace(extras, bias_BV=bias_BV)
    weights = jax.ShapeDtypeStruct((ROWS, K, V), jnp.float32)
    return slots, extras, empty_drafting(LAYOUT, weights=weights)


def one_pass(slots, extras, drafting, target, draft, *, acceptance):
    """Drafts, looks the target up at every place, and samples."""
    token_B, drafts, weights = slots.last_token_B, [], []
    places = [target[token_B]]
    for index in range(K):
        token_B, weights_BV = draw_draft(
            draft[token_B], slots, extras, slots.position_B + index, wants_weights=True
        )
        drafts.append(token_B)
        weights.append(weights_BV)
        places.append(target[token_B])
    drafting = dataclasses.replace(
        drafting, drafts_BK=jnp.stack(drafts, 1), weights_BKV=jnp.stack(weights, 1)
    )
    packed = jnp.asarray(LAYOUT.unchanged(does_decode=True, does_draft=True))
    mask_BW = jnp.full((ROWS, 1), -1, jnp.int32)
    slots, output, extras, drafting = sample_step.sample(
        slots, jnp.stack(places, 1), packed, extras, mask_BW, drafting,
        layout=LAYOUT, bucket=ROWS, variant="full", num_top=1, acceptance=acceptance,
    )  # fmt: skip
    return slots, extras, drafting, output.token_B, output.live_B


def first_tokens(case, acceptance="rejection"):
    """[N, 3] tokens of many rows, and the share of first drafts that were right."""
    step = jax.jit(functools.partial(one_pass, acceptance=acceptance))
    found, right = [], []
    for batch in range(BATCHES):
        state = start(case, batch)
        tokens, count = np.zeros((ROWS, PLACES * (1 + K)), int), np.zeros(ROWS, int)
        for index in range(PLACES):
            *state, token_QB, live_QB = step(*state, case.target, case.draft)
            token_QB, live_QB = np.asarray(token_QB), np.asarray(live_QB)
            if index == 0:
                right.append(live_QB[1].mean())
            for place in range(1 + K):
                rows = np.flatnonzero(live_QB[place])
                tokens[rows, count[rows]] = token_QB[place, rows]
                count[rows] += 1
        found.append(tokens[:, :PLACES])
    return np.concatenate(found), float(np.mean(right))


def p_value(case, tokens):
    """Chi-square of the joint distribution; rare outcomes count as one."""
    wanted = case.joint().ravel() * len(tokens)
    cells = np.ravel_multi_index(tuple(tokens.T), (V,) * PLACES)
    seen = np.bincount(cells, minlength=wanted.size).astype(float)
    if seen[wanted == 0].any():
        return 0.0  # what filters leave out never comes
    often = wanted >= 10
    seen = np.append(seen[often], seen[~often].sum())
    wanted = np.append(wanted[often], wanted[~often].sum())
    keep = wanted > 0
    if keep.sum() < 2:
        return 1.0
    return scipy.stats.chisquare(seen[keep], wanted[keep]).pvalue


@pytest.mark.parametrize("seed", range(6))
def test_the_joint_distribution_is_the_targets(seed):
    case = Case.random(seed)
    tokens, _ = first_tokens(case)
    assert len(tokens) == 200_000
    assert p_value(case, tokens) > 1e-4


def always(target_BV, draft_B, draft_BV, **counters):
    """Takes every draft."""
    return draft_B


def from_target(target_BV, draft_B, draft_BV, **counters):
    """Draws anew from the target, and not from what it has over the draft."""
    found_B = rejection.accept_or_resample(target_BV, draft_B, draft_BV, **counters)
    again_B = rejection.accept_or_resample(
        target_BV, jnp.full_like(draft_B, V), jnp.full_like(target_BV, -jnp.inf)
        .at[:, 0].set(0), **counters,
    )  # fmt: skip
    return jnp.where(found_B == draft_B, found_B, again_B)


@pytest.mark.parametrize("broken", [always, from_target])
def test_a_broken_rule_is_caught(broken, monkeypatch):
    monkeypatch.setattr(sample_step, "accept_or_resample", broken)
    case = Case.random(1)
    tokens, _ = first_tokens(case)
    assert p_value(case, tokens) < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_right_as_often_as_coupling_and_rejection_allow(seed):
    case = dataclasses.replace(Case.random(seed), top_k=0, top_p=1.0, min_p=0.0)
    p = case.probabilities(case.target[0], np.zeros(V))
    q = case.probabilities(case.draft[0], np.zeros(V))
    # Two Gumbel races with the same noise: both are won by x with this probability.
    with np.errstate(divide="ignore", invalid="ignore"):
        coupled = sum(
            1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(V) if p[x] * q[x]
        )
    _, exact = first_tokens(case, "exact")
    _, rejected = first_tokens(case)
    assert abs(exact - coupled) < 0.01
    assert abs(rejected - np.minimum(p, q).sum()) < 0.01
    assert exact <= rejected + 0.01
    print(f"coupled {exact:.3f} ({coupled:.3f}), rejection {rejected:.3f}")


def test_exact_acceptance_keeps_the_distribution_too():
    case = Case.random(3)
    assert p_value(case, first_tokens(case, "exact")[0]) > 1e-4
