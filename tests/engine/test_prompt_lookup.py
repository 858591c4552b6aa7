"""What prompt lookup drafts, against the same said place by place."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.drafting import empty_drafting, learn, most_drafts, set_history
from headrace.engine.packed_layout import layout_of
from headrace.engine.prompt_lookup import LONGEST_MATCH, PromptLookup, look_up
from headrace.engine.proposer import propose
from headrace.engine.slots import empty_slots


def test_no_draft_lies_beyond_what_a_row_may_take(tiny_config):
    layout = layout_of(dataclasses.replace(tiny_config[1], draft="prompt-lookup"))
    K, rows = layout.num_drafts, jnp.arange(layout.num_slots)
    slots = dataclasses.replace(
        empty_slots(layout),
        active_B=rows != 5,
        position_B=jnp.full_like(rows, 20),
        remaining_B=jnp.maximum(1, rows),
        max_drafts_B=jnp.where(rows == 7, 1, K),
    )
    packed = jnp.asarray(layout.unchanged(does_decode=True))
    cache, drafting = propose(
        {}, (), empty_drafting(layout), slots, packed, None,
        proposer=PromptLookup(), layout=layout, bucket=8,
    )  # fmt: skip
    assert cache == ()
    counts = (drafting.drafts_BK >= 0).sum(axis=1).tolist()
    assert counts == [0, 0, 1, 2, 3, 0, 3, 1, *[0] * (layout.num_slots - 8)]


def brute(history, position, count):
    """What `look_up` says of itself, place by place."""
    known = history[: position + 1]
    best, length = -1, 0
    for place in range(position):
        agrees = 0
        while (
            agrees < LONGEST_MATCH
            and agrees <= place
            and known[place - agrees] == known[position - agrees]
        ):
            agrees += 1
        if agrees and agrees >= length:
            best, length = place, agrees
    if best < 0:
        return None
    text = list(known)
    while len(text) <= position + count:
        text.append(text[best + len(text) - position])
    return text[position + 1 :]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_look_up_finds_what_followed(data):
    texts = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=23),
                 min_size=4, max_size=4)
    )  # fmt: skip
    history = np.full((4, 24), 3, np.int32)  # what lies behind the text says nothing
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    last = np.array([len(text) - 1 for text in texts], np.int32)
    drafts, has_match = look_up(jnp.asarray(history), jnp.asarray(last), 5)
    for row in range(4):
        wanted = brute(history[row].tolist(), int(last[row]), 5)
        assert bool(has_match[row]) == (wanted is not None)
        if wanted is not None:
            assert drafts[row].tolist() == wanted


def test_the_number_of_drafts_follows_how_often_they_were_right(tiny_config):
    layout = layout_of(dataclasses.replace(tiny_config[1], draft="prompt-lookup"))
    B, K = layout.num_slots, layout.num_drafts
    rows = dataclasses.replace(
        empty_slots(layout),
        remaining_B=jnp.full(B, 100),
        max_drafts_B=jnp.full(B, K),
    )
    everyone, drafting = jnp.ones(B, bool), empty_drafting(layout, adapts=True)
    assert (most_drafts(drafting, rows, everyone) == K).all()
    # Row 0 is always right, row 1 every second time, row 2 never; row 3 had no drafts.
    for index in range(60):
        right = jnp.zeros(B, int).at[0].set(K).at[1].set(index % 2)
        drafts = jnp.full(B, K).at[3].set(0)
        drafting = learn(drafting, rows, right, drafts)
    found = most_drafts(drafting, rows, everyone)
    assert found[:4].tolist() == [K, 1, 1, K]
    assert 0.25 < float(drafting.skill_B[1]) < 0.5
    fixed = empty_drafting(layout)
    assert learn(fixed, rows, right, drafts).skill_B is None
    again = set_history(drafting, jnp.int32(2), jnp.zeros(layout.max_context_len, int))
    assert most_drafts(again, rows, everyone)[2] == K
