"""What a soak of a server counts, and what it makes of it. Pure: no clock, no network.

A status is gRPC's name or HTTP's number, and for a request that ran ":" and why it
ended: "OK:length", "200:stop", "CANCELLED", "gone" (we hung up).
"""

import collections
import statistics
from collections.abc import Mapping, Sequence

# Of one that ran to an end of its own.
GRPC_ENDS = frozenset(("OK:length", "OK:stop"))
HTTP_ENDS = frozenset(("200:length", "200:stop"))

# What each kind of call may end with. HUNG, INTERNAL, UNKNOWN, UNAVAILABLE and 500 are
# nowhere.
ALLOWED: Mapping[str, frozenset[str]] = {
    "canary": GRPC_ENDS,
    "grpc stream": GRPC_ENDS,
    "grpc once": GRPC_ENDS,
    "grpc disconnect": GRPC_ENDS | {"CANCELLED"},
    "grpc channel dropped": GRPC_ENDS | {"CANCELLED"},
    "grpc call deadline": GRPC_ENDS | {"DEADLINE_EXCEEDED"},
    "grpc deadline_s": GRPC_ENDS | {"OK:deadline"},
    "grpc queue_timeout_s": GRPC_ENDS | {"OK:rejected"},
    "grpc cancel": GRPC_ENDS | {"OK:cancelled"},
    "grpc limited tenant": GRPC_ENDS | {"RESOURCE_EXHAUSTED"},
    "grpc wrong value": frozenset(("INVALID_ARGUMENT",)),
    "grpc malformed": frozenset(("INVALID_ARGUMENT",)),
    "grpc oversized": frozenset(("RESOURCE_EXHAUSTED",)),
    "grpc wrong key": frozenset(("UNAUTHENTICATED",)),
    "grpc unknown method": frozenset(("UNIMPLEMENTED",)),
    "grpc at shutdown": GRPC_ENDS | {"OK:cancelled", "UNAVAILABLE"},
    "http stream": HTTP_ENDS,
    "http whole": HTTP_ENDS,
    "http disconnect": HTTP_ENDS | {"gone"},
    "http half a request": frozenset(("gone",)),
    "http wrong value": frozenset(("400",)),
    "http bad json": frozenset(("400",)),
    "http oversized": frozenset(("413",)),
    "http wrong key": frozenset(("401",)),
    "http wrong route": frozenset(("404", "405")),
    "http wrong type": frozenset(("415",)),
    "http garbage": frozenset(("400",)),
}


class Tally:
    """Calls by kind and status, and answers that must agree.

    Attributes:
      counts: calls by (kind, status).
      wrong: what went against a promise, in words.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.wrong: list[str] = []
        self._answers: dict[object, tuple[int, ...]] = {}

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        return self.counts.total()

    def count(self, kind: str, status: str) -> None:
        """A call has ended."""
        self.counts[kind, status] += 1

    def compare(self, question: object, token_ids: Sequence[int]) -> None:
        """An answer, whole or cut short, agrees with all others to its question."""
        given, known = tuple(token_ids), self._answers.get(question, ())
        shared = min(len(given), len(known))
        if given[:shared] != known[:shared]:
            self.wrong.append(
                f"{question}: {given[:shared]} differs from {known[:shared]}"
            )
        elif len(given) > len(known):
            self._answers[question] = given

    def unexpected(self) -> list[str]:
        """Statuses that a kind of call may not end with."""
        return [
            f"{kind}: {count} x {status}"
            for (kind, status), count in sorted(self.counts.items())
            if status not in ALLOWED[kind]
        ]

    def table(self) -> str:
        """A line per kind: its calls by status."""
        kinds: dict[str, list[str]] = {}
        for (kind, status), count in sorted(self.counts.items()):
            kinds.setdefault(kind, []).append(f"{count} {status}")
        return "\n".join(f"{kind:<22}{', '.join(kinds[kind])}" for kind in kinds)


def growth_percent(samples: Sequence[float]) -> float:
    """By how much memory has grown after a warm-up quarter.

    Args:
      samples: bytes at even distances over the whole run, at least 4.

    Returns:
      The median of the last quarter over that of the second, less 1, in percent.

    Raises:
      ValueError: too few samples.
    """
    if len(samples) < 4:
        raise ValueError(f"memory must be looked at 4 times or more, got {samples}")
    quarter = len(samples) // 4
    early = statistics.median(samples[quarter : 2 * quarter])
    late = statistics.median(samples[-quarter:])
    return 100 * (late / early - 1)
