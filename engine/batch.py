"""The border between host and device: the only place that chooses buckets and pads.

Turns a Schedule into one packed int32 array and the names of the programs that will
read it. Knows no jax and no model.
"""

import dataclasses

import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.packed_layout import ROW_FIELDS, PackedLayout
from headrace.engine.request import Request
from headrace.engine.sampling_params import SampleVariant
from headrace.engine.schedule import (
    PageCopy,
    PageMove,
    PrefillChunk,
    Resumption,
    Schedule,
    pick_decode_bucket,
    pick_prefill_shape,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, ready to dispatch.

    Attributes:
      copies, saves, loads: page moves that go before the programs, in this order.
      packed: [W] int32, see PackedLayout.
      histories: requests whose tokens so far go to the device, and to which row.
      extras: requests whose row of counts and biases is written before the sample
        call, and which row.
      decode_bucket: rows of the decode call, None where nothing decodes.
      does_draft: the decode call verifies drafts.
      prefill_shape: (rows, tokens) of the prefill call, None where there is none.
      sample_bucket: rows of the sample call, which always runs.
      variant: the cheapest sample variant that serves every row.
      does_score: the prefill call also scores its prompts.
      has_grammar: the sample call waits for masks.
      logits_slots: slots whose row of logits the host wants.
    """

    copies: tuple[PageCopy, ...] = ()
    saves: tuple[PageMove, ...] = ()
    loads: tuple[PageMove, ...] = ()
    packed: np.ndarray
    histories: tuple[tuple[Request, int], ...] = ()
    extras: tuple[tuple[Request, int], ...] = ()
    decode_bucket: int | None
    does_draft: bool = False
    prefill_shape: tuple[int, int] | None
    sample_bucket: int
    variant: SampleVariant
    does_score: bool = False
    has_grammar: bool = False
    logits_slots: tuple[int, ...] = ()


def plan_step(
    schedule: Schedule,
    config: EngineConfig,
    layout: PackedLayout,
    *,
    does_draft: bool = False,
) -> StepPlan:
    """Chooses buckets and packs what the device needs to know.

    Args:
      schedule: rows of this step, with their slots as they are after its moves.
      config: resolved; its buckets are those that the runner uses.
      layout: where the fields of the packed array lie.
      does_draft: if anything decodes, it does with drafts.
    """
    does_draft &= bool(schedule.decode)
    packed = layout.unchanged(does_decode=bool(schedule.decode), does_draft=does_draft)
    if schedule.slot_sources is not None:
        layout.source(packed)[:] = schedule.slot_sources
    for slot in schedule.released:
        layout.released(packed)[slot] = 1
    for slot, page in schedule.new_pages:
        layout.new_pages(packed)[slot] = page
    shape = None
    if schedule.prefill:
        shape = pick_prefill_shape(
            config.prefill_shapes or (),
            rows=len(schedule.prefill),
            tokens=max(chunk.length for chunk in schedule.prefill),
        )
        assert shape is not None, "the scheduler picks chunks that fit a shape"
        _pack_prefill(packed, schedule.prefill, shape, layout)
    num_rows = len(schedule.prefill)
    _pack_resumed(packed, schedule.resumed, num_rows, layout)
    _pack_forks(packed, schedule, num_rows + len(schedule.resumed), layout)
    sampled_rows = max(
        [
            schedule.num_rows if schedule.decode else 1,
            *(row.slot + 1 for row in schedule.fresh),
        ]
    )
    sizes = config.decode_batch_sizes or ()
    return StepPlan(
        copies=schedule.copies,
        saves=schedule.saves,
        loads=schedule.loads,
        packed=packed,
        histories=schedule.histories if layout.num_drafts else (),
        extras=schedule.extras,
        decode_bucket=(
            pick_decode_bucket(sizes, schedule.num_rows) if schedule.decode else None
        ),
        does_draft=does_draft,
        prefill_shape=shape,
        sample_bucket=pick_decode_bucket(sizes, sampled_rows),
        variant=schedule.needs.variant,
        does_score=any(
            chunk.request.params.prompt_logprobs is not None
            for chunk in schedule.prefill
        ),
        has_grammar=schedule.needs.has_grammar,
        logits_slots=_logits_slots(schedule) if schedule.needs.wants_logits else (),
    )


def _logits_slots(schedule: Schedule) -> tuple[int, ...]:
    rows = schedule.sampled
    return tuple(slot for slot, request in rows if request.params.wants_logits)


def _pack_prefill(
    packed: np.ndarray,
    chunks: tuple[PrefillChunk, ...],
    shape: tuple[int, int],
    layout: PackedLayout,
) -> None:
    rows = layout.rows(packed)
    tokens = layout.tokens(packed, *shape)
    for row, chunk in enumerate(chunks):
        end = chunk.start + chunk.length
        total = chunk.request.fill_len
        done = total - chunk.request.prompt_len
        values = {
            "slot": chunk.slot,
            "start": chunk.start,
            "length": chunk.length,
            "is_last": int(chunk.is_last),
            "next_token": -1 if end >= total else chunk.request.tokens(end, end + 1)[0],
            "remaining": chunk.request.max_tokens - done,
        }
        _pack_row(rows, row, values, chunk.request, layout)
        tokens[row, : chunk.length] = chunk.request.tokens(chunk.start, end)


def _pack_resumed(
    packed: np.ndarray,
    resumed: tuple[Resumption, ...],
    first_row: int,
    layout: PackedLayout,
) -> None:
    rows = layout.rows(packed)
    for row, back in enumerate(resumed, first_row):
        values = {
            "slot": back.slot,
            "resumes": 1,
            "position": back.position,
            "last_token": back.last_token,
            "remaining": back.remaining,
        }
        _pack_row(rows, row, values, back.request, layout)


def _pack_forks(
    packed: np.ndarray, schedule: Schedule, first_row: int, layout: PackedLayout
) -> None:
    rows = layout.rows(packed)
    for row, fork in enumerate(schedule.forks, first_row):
        values = {
            "slot": fork.slot,
            "source": 1 + fork.source,
            "position": fork.request.prompt_len - 1,
            "remaining": fork.request.max_tokens,
        }
        _pack_row(rows, row, values, fork.request, layout)


def _pack_row(
    rows: np.ndarray,
    row: int,
    values: dict[str, int],
    request: Request,
    layout: PackedLayout,
) -> None:
    """Writes a row: its own values, then what follows from the request alone."""
    values = values | _request_values(request)
    values["max_drafts"] = _max_drafts(request, layout)
    rows[row, : len(ROW_FIELDS)] = [values.get(name, 0) for name in ROW_FIELDS]
    stop_ids = layout.stop_ids(rows)[row]
    stop_ids[:] = -1
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    layout.page_table(rows)[row, : len(request.pages)] = request.pages


def _max_drafts(request: Request, layout: PackedLayout) -> int:
    """No drafts where the host has to see each token before the next."""
    params = request.params
    waits = params.structured_outputs is not None or params.wants_logits
    return 0 if waits else layout.num_drafts


def _request_values(request: Request) -> dict[str, int]:
    params, seed = request.params, request.seed % 2**64
    return {
        "seed_low": _word(seed % 2**32),
        "seed_high": _word(seed >> 32),
        "temperature": _float_bits(params.temperature),
        "top_k": max(params.top_k, 0),
        "top_p": _float_bits(params.top_p),
        "min_p": _float_bits(params.min_p),
        "has_extras": int(params.has_extras),
        # With a grammar the mask says when it may end, and when it must.
        "min_position": 0
        if request.grammar
        else request.prompt_len + params.min_tokens,
        "presence": _float_bits(params.presence_penalty),
        "frequency": _float_bits(params.frequency_penalty),
        "repetition": _float_bits(params.repetition_penalty),
    }


def _word(value: int) -> int:
    """An unsigned 32-bit word as the int32 with the same bits."""
    return value - 2**32 if value >= 2**31 else value


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
