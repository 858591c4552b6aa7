"""Text as a reader may see it: nothing after a stop string, nothing half-drawn. No jax.

Between the detokenizer, which gives whole characters, and the user. Held back is only
what later text can still change or take away: the beginning of a stop string, a
trailing zero-width joiner, and half of a flag (an unpaired regional indicator).
"""

from collections.abc import Sequence

_JOINER = "\u200d"


class TextStream:
    """Passes text on, up to the first stop string.

    Worked example: with the stop string "END" the pieces "a E", "N", "T E", "NDED"
    give "a ", "", "ENT ", "" and then the stream has stopped.

    Args:
      stops: stop strings; the one that begins first ends the text, among those that
        begin together the one listed first.
      keeps_stop: the stop string itself stays in the text.

    Attributes:
      stopped_by: the stop string that was found; None until then.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool) -> None:
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held = ""
        self._num_plain = 0  # of those held: they came before a stop string counted
        self.stopped_by: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Adds text and returns what is certain.

        Args:
          text: the next piece.
          may_stop: whether a stop string ends the text yet; before, it is plain text.
        """
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        if not may_stop:
            self._num_plain = len(text)
        if may_stop and self._stops:
            # A match has to end behind what is plain text for good.
            found = [
                (text.find(stop, max(0, self._num_plain - len(stop) + 1)), i)
                for i, stop in enumerate(self._stops)
            ]
            begin, which = min((f for f in found if f[0] >= 0), default=(-1, 0))
            if begin >= 0:
                stop = self._stops[which]
                self._held, self.stopped_by = "", stop
                return text[: begin + len(stop) * self._keeps_stop]
        end = len(text) - self._begun_stop(text)
        while more := _unfinished(text[:end]):
            end -= more
        certain, self._held = text[:end], text[end:]
        self._num_plain = max(0, self._num_plain - len(certain))
        return certain

    def flush(self) -> str:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _begun_stop(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def _unfinished(text: str) -> int:
    """Characters at the end that are drawn together with what follows."""
    if text.endswith(_JOINER):
        return 1
    flags = len(text) - len(text.rstrip(_REGIONAL))
    return flags % 2


# Regional indicators A to Z; two of them make a flag (Unicode Standard, annex 29).
_REGIONAL = "".join(map(chr, range(0x1F1E6, 0x1F200)))
