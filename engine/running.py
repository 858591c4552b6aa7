"""Who holds which slot, and what a step needs of each in arrays. No jax.

A slot is a row of the decode batch. Decoding requests have two counters per slot:
`left`, tokens they may still be asked for, and `room`, tokens that still fit into the
pages they hold. A steady step touches arrays only; lists of requests are made anew
only after somebody came, went or moved.
"""

from collections.abc import Sequence

import numpy as np

from headrace.engine.compaction import plan_swaps, swaps_to_sources
from headrace.engine.request import Request, RequestStatus
from headrace.engine.schedule import RowNeeds, Schedule

# Room of those who hold all pages that they can ever need.
NO_BOUND = 2**40


class RunningSet:
    """Slots and the requests that decode in them.

    Attributes:
      extra_rows: per slot, its row of `Extras` on the device, which stays with the
        request when it moves.
      left, room: [B] int64, meaningful for slots whose request decodes.
    """

    def __init__(
        self,
        num_slots: int,
        decode_batch_sizes: Sequence[int],
        tokens_per_step: int = 1,
    ) -> None:
        self.holders: list[Request | None] = [None] * num_slots
        self.extra_rows = list(range(num_slots))
        self.left = np.zeros(num_slots, np.int64)
        self.room = np.zeros(num_slots, np.int64)
        self._tokens_per_step = tokens_per_step
        self._decode_batch_sizes = tuple(decode_batch_sizes)
        self._decodes = np.zeros(num_slots, bool)
        self._is_stale = self._may_compact = True
        self._rows: tuple[Request, ...] = ()
        self._slots = np.zeros(0, np.int64)
        self._num_rows = 0
        self._needs = RowNeeds()

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return self.holders.count(None)

    @property
    def num_rows(self) -> int:
        """1 + the highest taken slot."""
        self._refresh()
        return self._num_rows

    def place(self, request: Request) -> int:
        """Gives the lowest free slot; there must be one."""
        slot = self.holders.index(None)
        self.holders[slot] = request
        request.slot = slot
        self._is_stale = self._may_compact = True
        return slot

    def vacate(self, slot: int) -> None:
        """Nobody holds the slot any more."""
        self.holders[slot] = None
        self._decodes[slot] = False
        self._is_stale = self._may_compact = True

    def start_decode(self, slot: int, *, left: int, room: int) -> None:
        """The slot's request decodes from the next pick on."""
        self.left[slot], self.room[slot] = left, room
        self._decodes[slot] = left > 0
        self._is_stale = True

    def stop_decode(self, slot: int) -> None:
        """The slot's request decodes no more, but may keep the slot."""
        self._decodes[slot] = False
        self._is_stale = True

    def decode_rows(self) -> tuple[tuple[Request, ...], np.ndarray]:
        """Requests that can decode a token now, and their slots, ascending."""
        self._refresh()
        return self._rows, self._slots

    def decode_needs(self) -> RowNeeds:
        """What `decode_rows` ask of a sample call."""
        self._refresh()
        return self._needs

    def short_of_room(self) -> np.ndarray:
        """Slots among them whose next tokens may not fit into their pages."""
        slots = self.decode_rows()[1]
        return slots[self.room[slots] < self._tokens_per_step]

    def count_decode(self) -> None:
        """Every request of `decode_rows` was asked for a token, and any drafts."""
        slots = self._slots
        self.left[slots] -= 1
        self.room[slots] -= self._tokens_per_step
        assert slots.size == 0 or self.room[slots].min() >= 0, "no page to write to"
        done = slots[self.left[slots] <= 0]
        if done.size:
            self._decodes[done] = False
            self._is_stale = True

    def settle(self, schedule: Schedule, num_tokens: np.ndarray) -> None:
        """Books how many tokens a step with drafts gave, where one each was counted.

        Args:
          schedule: of that step.
          num_tokens: [B] by its slots.
        """
        slots = schedule.decode_slots.tolist()
        for request, slot in zip(schedule.decode, slots, strict=True):
            more = int(num_tokens[slot]) - 1
            if request.finish_reason is not None or more < 0:
                continue
            request.num_dispatched += more
            if request.status is not RequestStatus.DECODING:
                # It waits; where it has to be computed again, with these tokens.
                if request.fill_len > request.prompt_len:
                    request.fill_len += more
                continue
            assert (now := request.slot) is not None
            self.left[now] -= more
            self.room[now] += self._tokens_per_step - 1 - more
            if self.left[now] <= 0:
                self.stop_decode(now)

    def compact(self) -> tuple[int, ...] | None:
        """Moves requests down where that saves a decode bucket.

        Returns:
          The permutation (new slot i takes old slot sources[i]), or None.
        """
        if not self._may_compact:
            return None
        self._may_compact = False
        is_taken = [holder is not None for holder in self.holders]
        swaps = plan_swaps(is_taken, self._decode_batch_sizes)
        if not swaps:
            return None
        for low, high in swaps:
            request = self.holders[high]
            assert request is not None and self.holders[low] is None
            request.slot = low
            self.holders[low], self.holders[high] = request, None
        sources = swaps_to_sources(swaps, len(self.holders))
        self.extra_rows = [self.extra_rows[source] for source in sources]
        for array in (self.left, self.room, self._decodes):
            array[:] = array[list(sources)]
        self._is_stale = True
        return sources

    def _refresh(self) -> None:
        if not self._is_stale:
            return
        slots = np.flatnonzero(self._decodes)
        rows = [self.holders[slot] for slot in slots.tolist()]
        self._rows = tuple([row for row in rows if row is not None])
        assert len(self._rows) == slots.size, "a decoding slot without a request"
        self._slots = slots
        self._needs = RowNeeds.of(self._rows)
        taken = [slot for slot, holder in enumerate(self.holders) if holder is not None]
        self._num_rows = taken[-1] + 1 if taken else 0
        self._is_stale = False
