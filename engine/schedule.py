"""What the scheduler asks of one step, and what the step gives back. No jax.

`batch` packs a Schedule; `model_runner.read_step` returns a StepResult.
"""

import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from headrace.engine.request import Request, TokenLogprobs
from headrace.engine.sampling_params import TOP_ON_DEVICE, SampleVariant

FINISH_RUNNING, FINISH_STOP, FINISH_LENGTH, FINISH_STUCK = 0, 1, 2, 3
_DEAREST_FIRST: tuple[SampleVariant, ...] = typing.get_args(SampleVariant)[::-1]


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowNeeds:
    """What some rows together ask of a sample call.

    Attributes:
      variant: the cheapest that serves all of them.
      has_grammar: some row's mask follows from the token before.
      wants_logits: some row's logits go to the host as they are.
    """

    variant: SampleVariant = "greedy"
    has_grammar: bool = False
    wants_logits: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "RowNeeds":
        """The needs of these requests."""
        params = [request.params for request in requests]
        variants = {one.variant for one in params}
        return cls(
            variant=next((v for v in _DEAREST_FIRST if v in variants), "greedy"),
            has_grammar=any(one.structured_outputs is not None for one in params),
            wants_logits=any(one.wants_logits for one in params),
        )

    def __or__(self, other: "RowNeeds") -> "RowNeeds":
        """The needs of both."""
        variants = (self.variant, other.variant)
        return RowNeeds(
            variant=next(v for v in _DEAREST_FIRST if v in variants),
            has_grammar=self.has_grammar or other.has_grammar,
            wants_logits=self.wants_logits or other.wants_logits,
        )


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
      histories: (request, row) of those that decode from here on, with drafts.
      extras: (request, row) of those that sample first here, or again after a
        preemption, and have counts or biases.
      needs: of the rows that sample here.
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
    histories: tuple[tuple[Request, int], ...] = ()
    extras: tuple[tuple[Request, int], ...] = ()
    needs: RowNeeds = RowNeeds()
    decode: tuple[Request, ...] = ()
    decode_slots: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    num_rows: int

    @property
    def fresh(self) -> list[PrefillChunk | Fork]:
        """See `fresh_rows`."""
        return fresh_rows(self.prefill, self.forks)

    @property
    def sampled(self) -> list[tuple[int, Request]]:
        """Slots that sample in this step, and who holds them."""
        decode = zip(self.decode_slots.tolist(), self.decode, strict=True)
        return [*((row.slot, row.request) for row in self.fresh), *decode]


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities that the device found; X are rows, or rows and tokens.

    Attributes:
      logprob, rank: [X] of the token in question.
      top_ids, top_logprobs: [X, J] of the likeliest tokens.
      log_total: [X] what makes a logit a log-probability when subtracted.
    """

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    log_total: np.ndarray

    def at(self, place: tuple[int, ...], token_id: int, num_top: int) -> TokenLogprobs:
        """A token, then the `num_top` likeliest, by token id."""
        ids = self.top_ids[place][:num_top].tolist()
        values = self.top_logprobs[place][:num_top].tolist()
        first = (float(self.logprob[place]), int(self.rank[place]))
        return _entries(token_id, first, ids, values)

    def from_logits(
        self, slot: int, token_id: int, num_top: int, logits: np.ndarray
    ) -> TokenLogprobs:
        """Likewise for more than the device found, from a row of logits [V].

        The bits are those of the device: the same float32 subtraction.
        """
        order = np.argsort(-logits, kind="stable")[: num_top if num_top >= 0 else None]
        values = (logits[order] - self.log_total[slot]).tolist()
        first = (float(self.logprob[slot]), int(self.rank[slot]))
        return _entries(token_id, first, order.tolist(), values)


def _entries(
    token_id: int, first: tuple[float, int], ids: list[int], values: list[float]
) -> TokenLogprobs:
    entries: TokenLogprobs = {token_id: first}
    for place, (other, value) in enumerate(zip(ids, values, strict=True)):
        entries.setdefault(other, (value, place + 1))
    return entries


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the device gave, rows by slot (those of the sample bucket).

    Attributes:
      token_ids: [B] sampled tokens; meaningless for slots that did not sample.
      finish_codes: [B] 0 runs on, 1 stop id, 2 length, 3 no token is allowed.
      scores: of the sampled tokens, where a row asked.
      logits: by slot, rows [V] of those that asked for more than `scores` holds.
      prompt_scores: of what follows each prompt token, by row and token of the prefill
        call, where a row asked.
      live: [B] bool, slots that have a token here; None where all that sampled have.
      num_tokens, num_drafts: [B] tokens of each slot, `later` ones included, and how
        many were drafted; None is one each, and none.
      later: what came of accepted drafts, place by place.
    """

    token_ids: np.ndarray
    finish_codes: np.ndarray
    scores: Scores | None = None
    logits: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    prompt_scores: Scores | None = None
    live: np.ndarray | None = None
    num_tokens: np.ndarray | None = None
    num_drafts: np.ndarray | None = None
    later: tuple["StepResult", ...] = ()

    def logprobs_at(self, slot: int, num_top: int) -> TokenLogprobs:
        """The sampled token of a slot, then its `num_top` likeliest, by token id."""
        assert self.scores is not None
        token_id = int(self.token_ids[slot])
        if 0 <= num_top <= TOP_ON_DEVICE:
            return self.scores.at((slot,), token_id, num_top)
        return self.scores.from_logits(slot, token_id, num_top, self.logits[slot])


def pick_prefill_shape(
    shapes: Sequence[tuple[int, int]], *, rows: int, tokens: int
) -> tuple[int, int] | None:
    """The (rows, tokens) bucket with least padding that holds a call, if any does."""
    fitting = [shape for shape in shapes if shape[0] >= rows and shape[1] >= tokens]
    return min(fitting, key=lambda shape: (shape[0] * shape[1], shape), default=None)


def pick_decode_bucket(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of the ascending decode buckets with `num_rows` rows."""
    return next(size for size in sizes if size >= num_rows)
