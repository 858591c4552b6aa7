"""Fakes shared by the engine's host-side tests."""

import dataclasses
import zlib

import numpy as np
import pytest

PAGE_SIZE = 16
VOCAB_SIZE = 11


def next_token(history):
    """The fake model: any token depends on all before it."""
    return zlib.crc32(bytes(history)) % VOCAB_SIZE


@dataclasses.dataclass
class Row:
    """A slot's row, as the device keeps it."""

    request_id: str
    pages: list[int]
    position: int  # of the last token
    remaining: int
    stop_ids: tuple[int, ...]
    last_token: int | None = None  # not yet in the pages
    is_active: bool = True


class FakeDevice:
    """Applies Schedules like the compiled steps do, with real pages and rows.

    Tokens follow from what the pages hold, so a wrong page, row or order shows.
    """

    def __init__(self, num_slots, num_pages):
        self.rows = [None] * num_slots
        self.pages = [[None] * PAGE_SIZE for _ in range(num_pages)]

    def step(self, schedule):
        """Runs one step; returns (token ids, finish codes) with junk elsewhere."""
        if schedule.slot_sources is not None:
            assert sorted(schedule.slot_sources) == list(range(len(self.rows)))
            self.rows = [self.rows[source] for source in schedule.slot_sources]
        for slot in schedule.released:
            if self.rows[slot] is not None:
                self.rows[slot].is_active = False
        tokens = np.full(len(self.rows), -7, np.int32)
        finish = np.full(len(self.rows), 0, np.int32)
        if schedule.decode:
            for slot, row in enumerate(self.rows):
                if row is not None and row.is_active:
                    assert slot < schedule.num_rows
                    self._write(row.pages, row.position, row.last_token)
                    tokens[slot], finish[slot] = self._sample(row)
        for chunk in schedule.prefill:
            row = self._prefill(chunk)
            if row is not None:
                tokens[chunk.slot], finish[chunk.slot] = self._sample(row)
        return tokens, finish

    def _prefill(self, chunk):
        request, end = chunk.request, chunk.start + chunk.length
        for position in range(chunk.start, end):
            token = request.prompt_token_ids[position]
            self._write(request.pages, position, token)
        if not chunk.is_last:
            return None
        old = self.rows[chunk.slot]
        assert old is None or not old.is_active, "the slot has another request"
        row = Row(
            request_id=request.request_id,
            pages=list(request.pages),
            position=end - 1,
            remaining=request.max_tokens,
            stop_ids=request.stop_ids,
        )
        self.rows[chunk.slot] = row
        return row

    def _write(self, pages, position, token):
        self.pages[pages[position // PAGE_SIZE]][position % PAGE_SIZE] = token

    def _sample(self, row):
        history = [
            self.pages[row.pages[p // PAGE_SIZE]][p % PAGE_SIZE]
            for p in range(row.position + 1)
        ]
        row.last_token = next_token(history)
        row.position += 1
        row.remaining -= 1
        code = 1 if row.last_token in row.stop_ids else 2 * (row.remaining == 0)
        row.is_active = code == 0
        return row.last_token, code


def tokens_alone(request):
    """What the fake model gives the request in an engine of its own."""
    history = list(request.prompt_token_ids)
    output = []
    while len(output) < request.max_tokens:
        output.append(next_token([*history, *output]))
        if output[-1] in request.stop_ids:
            break
    return output


@pytest.fixture(scope="session")
def fake_device():
    """The FakeDevice class."""
    return FakeDevice


@pytest.fixture(scope="session")
def alone():
    """The function `tokens_alone`."""
    return tokens_alone
