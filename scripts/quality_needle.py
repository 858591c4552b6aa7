"""A needle in a haystack: is a number, told once, still found in a long context?

The text names a random number for a place, somewhere in a text about other things, and
in the end begins to tell it again. Found is what would have been told: every token of
the number is the likeliest after those before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_TOLD = "\nThe secret number of {place} is {number}. Remember it.\n"
_ASKED = "\nThe secret number of {place} is"
_PLACES = (
    "Lisbon", "Oslo", "Lima", "Cairo", "Quito", "Hanoi", "Accra", "Turin", "Perth",
    "Delhi",
)  # fmt: skip


class Needle(NamedTuple):
    """A context that ends with the number, and how many tokens the number has."""

    token_ids: np.ndarray
    answer_len: int


def needles(
    encode: Callable[[str], Sequence[int]],
    filler: Sequence[int],
    length: int,
    count: int,
) -> list[Needle]:
    """Contexts of one length, the number in evenly spaced depths.

    Args:
      encode: text to token ids, without special ones.
      filler: ids of a text about other things.
      length: tokens of each context.
      count: contexts.

    Raises:
      ValueError: a context too short for what it must hold, or too little text.
    """
    made = []
    for i in range(count):
        place = _PLACES[i % len(_PLACES)]
        number = int(np.random.default_rng(i).integers(10_000, 99_999))
        told = list(encode(_TOLD.format(place=place, number=number)))
        asked = list(encode(_ASKED.format(place=place)))
        answer = list(encode(f" {number}"))
        room = length - len(told) - len(asked) - len(answer)
        if room < 1 or len(filler) < room:
            raise ValueError(
                f"needles in {length} tokens need a text of {room} tokens, at least 1; "
                f"there are {len(filler)}"
            )
        depth = room * i // count
        ids = [*filler[:depth], *told, *filler[depth:room], *asked, *answer]
        made.append(Needle(np.asarray(ids, np.int32), len(answer)))
    return made


def found_share(
    forward: Callable[[Any, np.ndarray], jax.Array],
    params: Any,
    contexts: Sequence[Needle],
) -> float:
    """Share of needles that a model finds, all of their tokens.

    Args:
      forward: gives scores [T, V] of tokens [T].
      params: of the model.
      contexts: see `needles`.
    """
    found = 0
    for ids, size in contexts:
        scores = np.asarray(forward(params, ids)[-size - 1 : -1])
        found += bool((scores.argmax(-1) == ids[-size:]).all())
    return found / len(contexts)
