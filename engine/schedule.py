"""What the scheduler asks of one step, and what the step gives back. No jax.

`batch` packs a Schedule; `model_runner.read_step` returns a StepResult.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from headrace.engine.request import Request, TokenLogprobs

FINISH_RUNNING, FINISH_STOP, FINISH_LENGTH = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """Prompt tokens [start, start + length) of one request, one row of a call.

    Attributes:
      request: whose prompt it is.
      slot: the request's slot in this step.
      start, length: in tokens.
      is_last: the prompt ends here, so the step also samples the first output token.
    """

    request: Request
    slot: int
    start: int
    length: int
    is_last: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageMove:
    """Pages of one request on their way: device[i] goes to or comes from host[i]."""

    device: tuple[int, ...]
    host: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PageCopy:
    """The content of one page that goes to another, before its holder writes there."""

    source: int
    target: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """A further completion of a prompt whose last chunk is in this step.

    Attributes:
      request: its row begins like the leader's, with its own seed and pages.
      slot: the request's slot in this step.
      source: the leader's place among the step's chunks.
    """

    request: Request
    slot: int
    source: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A preempted request's row as it was, with its pages back on the device.

    Attributes:
      request: whose row it is; its pages are the row's page table.
      slot: the request's slot in this step.
      position: of the token sampled last, which is not yet in the pages.
      last_token: that token.
      remaining: tokens that it may still sample.
    """

    request: Request
    slot: int
    position: int
    last_token: int
    remaining: int

    @classmethod
    def of(cls, request: Request) -> "Resumption":
        """The row of a request that holds its slot and pages again."""
        assert request.slot is not None
        return cls(
            request=request,
            slot=request.slot,
            position=request.num_computed,
            last_token=request.output_token_ids[-1],
            remaining=request.max_tokens - request.num_dispatched,
        )


def fresh_rows(
    prefill: Sequence[PrefillChunk], forks: Sequence[Fork]
) -> list[PrefillChunk | Fork]:
    """Rows whose request begins to decode: last chunks, and the forks of them."""
    return [*(chunk for chunk in prefill if chunk.is_last), *forks]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """One step. On the device: pages are copied, move out and in; rows move, released
    ones end, page tables grow; then resumed rows, chunks and forks apply.

    All slots are numbered as they are after the move.

    Attributes:
      slot_sources: new slot i takes the row of old slot slot_sources[i], a
        permutation of all; None where nothing moves.
      released: slots whose request the host has ended. A chunk of this step may
        already belong to such a slot's next request.
      new_pages: (slot, page): the row's next token opens this page.
      copies, saves, loads: within the pool, to and from the host pool, in this order,
        before all else.
      resumed: rows that come back after a preemption; they decode in this step.
      prefill: rows of at most one prefill call; one bucket holds them all.
      forks: rows that sample from the logits of a last chunk of this step.
      extras: (request, row) of those that sample first here, or again after a
        preemption, and have counts or biases.
      decode: requests that decode one token: all that have tokens left, or none.
      decode_slots: their slots, ascending (requests may have moved at `update`).
      num_rows: 1 + the highest taken slot: what a decode call has to cover. In the
        static policy that includes ended requests till their batch is done.
    """

    slot_sources: tuple[int, ...] | None = None
    released: tuple[int, ...] = ()
    new_pages: tuple[tuple[int, int], ...] = ()
    copies: tuple[PageCopy, ...] = ()
    saves: tuple[PageMove, ...] = ()
    loads: tuple[PageMove, ...] = ()
    resumed: tuple[Resumption, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    forks: tuple[Fork, ...] = ()
    extras: tuple[tuple[Request, int], ...] = ()
    decode: tuple[Request, ...] = ()
    decode_slots: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    num_rows: int

    @property
    def fresh(self) -> list[PrefillChunk | Fork]:
        """See `fresh_rows`."""
        return fresh_rows(self.prefill, self.forks)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the device gave, rows by slot (those of the sample bucket).

    Attributes:
      token_ids: [B] sampled tokens; meaningless for slots that did not sample.
      finish_codes: [B] 0 runs on, 1 stop id, 2 length.
      logprob, rank: [B] of the sampled token, where a row asked.
      top_ids, top_logprobs: [B, J] of the likeliest tokens, where a row asked.
    """

    token_ids: np.ndarray
    finish_codes: np.ndarray
    logprob: np.ndarray | None = None
    rank: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def logprobs_at(self, slot: int, num_top: int) -> TokenLogprobs:
        """The sampled token of a slot, then its `num_top` likeliest, by token id."""
        assert self.logprob is not None
        rank = None if self.rank is None else int(self.rank[slot])
        sampled = int(self.token_ids[slot])
        entries: TokenLogprobs = {sampled: (float(self.logprob[slot]), rank)}
        if num_top:
            assert self.top_ids is not None and self.top_logprobs is not None
            ids = self.top_ids[slot, :num_top].tolist()
            values = self.top_logprobs[slot, :num_top].tolist()
            for place, token_id in enumerate(ids):
                entries.setdefault(token_id, (values[place], place + 1))
        return entries


def pick_prefill_shape(
    shapes: Sequence[tuple[int, int]], *, rows: int, tokens: int
) -> tuple[int, int] | None:
    """The (rows, tokens) bucket with least padding that holds a call, if any does."""
    fitting = [shape for shape in shapes if shape[0] >= rows and shape[1] >= tokens]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape), default=None)


def pick_decode_bucket(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of the ascending decode buckets with `num_rows` rows."""
    return next(size for size in sizes if size >= num_rows)
