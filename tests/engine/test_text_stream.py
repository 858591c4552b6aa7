"""Stop strings cut exactly, in any split; nothing else is lost or late."""

import hypothesis
import pytest
from hypothesis import strategies as st

from headrace.engine.text_stream import TextStream

PIECES = st.lists(st.text("abE\u200d\U0001f1e6\U0001f1e7", max_size=4), max_size=12)
STOPS = st.lists(st.text("abE", min_size=1, max_size=4), max_size=3)


def run(pieces, stops=(), keeps_stop=False):
    """(deltas, rest, the stop string)."""
    stream = TextStream(stops, keeps_stop=keeps_stop)
    deltas = [stream.push(piece) for piece in pieces]
    return deltas, stream.flush(), stream.stopped_by


def cut(text, stops, keeps_stop):
    """The same by looking at the whole text at once."""
    found = sorted(
        (text.index(stop), place) for place, stop in enumerate(stops) if stop in text
    )
    if not found:
        return text, None
    begin, place = found[0]
    return text[: begin + len(stops[place]) * keeps_stop], stops[place]


@hypothesis.settings(max_examples=500, deadline=None)
@hypothesis.given(PIECES, STOPS, st.booleans())
def test_any_split_stops_where_its_growing_text_first_holds_a_stop(
    pieces, stops, keeps_stop
):
    """The text ends with the piece in which a stop string is first whole."""
    deltas, rest, stopped_by = run(pieces, stops, keeps_stop)
    for count in range(len(pieces) + 1):
        wanted, stop = cut("".join(pieces[:count]), stops, keeps_stop)
        if stop is not None:
            assert ("".join(deltas[:count]), stopped_by) == (wanted, stop)
            assert "".join(deltas[count:]) + rest == ""
            return
    assert ("".join(deltas) + rest, stopped_by) == ("".join(pieces), None)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(PIECES, STOPS)
def test_only_what_can_still_change_is_held_back(pieces, stops):
    stream = TextStream(stops, keeps_stop=False)
    shown = whole = ""
    for piece in pieces:
        shown, whole = shown + stream.push(piece), whole + piece
        if stream.stopped_by is not None:
            return
        held = whole[len(shown) :]
        # Halves of what is drawn as one, then what may begin a stop string.
        begun = held.lstrip("\u200d\U0001f1e6\U0001f1e7")
        tails = [held[i:] for i in range(len(held) - len(begun) + 1)]
        assert not begun or any(s.startswith(t) for s in stops for t in tails)


@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        (["a E", "N", "T E", "NDED"], ["a ", "", "ENT ", ""]),
        (["\U0001f468\u200d", "\U0001f469!"], ["\U0001f468", "\u200d\U0001f469!"]),
        (["\U0001f1eb", "\U0001f1f7\U0001f1e9"], ["", "\U0001f1eb\U0001f1f7"]),
    ],
)
def test_worked_examples(pieces, deltas):
    assert run(pieces, ["END"])[0] == deltas


def test_text_before_stops_count_is_never_cut():
    stream = TextStream(["b"], keeps_stop=False)
    assert stream.push("abc", may_stop=False) == "abc"
    assert stream.push("xb") == "x" and stream.stopped_by == "b"
    stream = TextStream(["ab", "abc"], keeps_stop=False)
    assert stream.push("xab", may_stop=False) == "x"
    assert stream.push("Zab") == "abZ" and stream.stopped_by == "ab"
