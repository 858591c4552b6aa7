"""Where each field of a step's one packed int32 array lies.

The host sends one array a step: what changed in the slots, the prefill call's rows and
tokens, and the rows of requests that come back. The batch file writes it with numpy,
the steps read it under jit, and both take their slices from here. Floats and unsigned
words travel as their bits.

    [0, 1)                 1 if the slots decode in this step, 2 with drafts
    [1, 1 + B)             source: new slot i takes the row of old slot source[i]
    [1 + B, 1 + 2B)        released: 1 where the host ends the slot's request
    [1 + 2B, 1 + 3B)       new page: the page that the slot's next token opens, or 0
    then per row           slot, start, length, is_last, resumes, position, last token,
                           remaining, source, seed (2 words), temperature, top_k,
                           top_p, min_p, has extras, min position, presence,
                           frequency, repetition, next token, max drafts, stop
                           ids [S], page table [M]
    then                   prefill tokens, row-major
"""

import dataclasses
from typing import Any

import numpy as np

from headrace.configs.schema import EngineConfig

# Rows that a step can bring, besides its prefill rows: resumed and forked ones.
_LEAST_ROWS = 16
ROW_FIELDS = (
    "slot", "start", "length", "is_last", "resumes", "position", "last_token",
    "remaining", "source", "seed_low", "seed_high", "temperature", "top_k", "top_p",
    "min_p", "has_extras", "min_position", "presence", "frequency", "repetition",
    "next_token", "max_drafts",
)  # fmt: skip


def num_packed_rows(config: EngineConfig) -> int:
    """Rows that one step can bring under a resolved config."""
    assert config.prefill_shapes is not None and config.num_slots is not None
    widest = max(rows for rows, _ in config.prefill_shapes)
    return max(widest, min(_LEAST_ROWS, config.num_slots))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Sizes that fix the array: one layout for all programs of an engine.

    Attributes:
      num_slots: B.
      page_size: C.
      max_rows: rows of a step: prefill rows, resumed ones, forks.
      max_stop_ids: stop ids a row can carry.
      pages_per_request: M.
      max_tokens: prefill tokens of the largest prefill shape, rows times tokens.
      max_context_len: tokens of the longest request.
      num_drafts: drafts that a decode step verifies per row, at most.
    """

    num_slots: int
    page_size: int
    max_rows: int
    max_stop_ids: int
    pages_per_request: int
    max_tokens: int
    max_context_len: int
    num_drafts: int = 0

    @property
    def row_size(self) -> int:
        """Words of one row."""
        return len(ROW_FIELDS) + self.max_stop_ids + self.pages_per_request

    @property
    def rows_start(self) -> int:
        """First word of the rows."""
        return 1 + 3 * self.num_slots

    @property
    def tokens_start(self) -> int:
        """First word of the prefill tokens."""
        return self.rows_start + self.max_rows * self.row_size

    @property
    def size(self) -> int:
        """Words of the whole array."""
        return self.tokens_start + self.max_tokens

    def unchanged(self, *, does_decode: bool, does_draft: bool = False) -> np.ndarray:
        """An array for the host to write into: nothing moves, ends or prefills."""
        packed = np.zeros(self.size, np.int32)
        packed[0] = does_decode + (does_decode and does_draft)
        self.source(packed)[:] = np.arange(self.num_slots)
        return packed

    def does_decode(self, packed: Any) -> Any:
        """Whether the slots decode, a scalar."""
        return packed[0] > 0

    def does_draft(self, packed: Any) -> Any:
        """Whether they do with drafts, a scalar."""
        return packed[0] > 1

    def source(self, packed: Any) -> Any:
        """[B] old slot of each new slot."""
        return packed[1 : 1 + self.num_slots]

    def released(self, packed: Any) -> Any:
        """[B] 1 where a slot is given up."""
        return packed[1 + self.num_slots : 1 + 2 * self.num_slots]

    def new_pages(self, packed: Any) -> Any:
        """[B] page id where a slot's page table grows, else 0."""
        return packed[1 + 2 * self.num_slots : self.rows_start]

    def rows(self, packed: Any) -> Any:
        """[R, row_size] prefill rows, then resumed ones, then forks, then zeros."""
        flat = packed[self.rows_start : self.tokens_start]
        return flat.reshape(self.max_rows, self.row_size)

    def field(self, rows: Any, name: str) -> Any:
        """[R] one scalar field of the rows."""
        return rows[:, ROW_FIELDS.index(name)]

    def stop_ids(self, rows: Any) -> Any:
        """[R, S] stop ids, -1 where unused."""
        start = len(ROW_FIELDS)
        return rows[:, start : start + self.max_stop_ids]

    def page_table(self, rows: Any) -> Any:
        """[R, M] page ids, 0 where unused."""
        return rows[:, len(ROW_FIELDS) + self.max_stop_ids :]

    def tokens(self, packed: Any, rows: int, tokens: int) -> Any:
        """[rows, tokens] prefill tokens of a call of that shape."""
        flat = packed[self.tokens_start : self.tokens_start + rows * tokens]
        return flat.reshape(rows, tokens)


def layout_of(config: EngineConfig) -> PackedLayout:
    """The packed layout that a resolved config asks for."""
    shapes = config.prefill_shapes
    assert config.num_slots and config.max_context_len and shapes
    return PackedLayout(
        num_slots=config.num_slots,
        page_size=config.page_size,
        max_rows=num_packed_rows(config),
        max_stop_ids=config.max_stop_ids,
        pages_per_request=-(-config.max_context_len // config.page_size),
        max_tokens=max(rows * tokens for rows, tokens in shapes),
        max_context_len=config.max_context_len,
        num_drafts=config.drafts_per_pass,
    )
