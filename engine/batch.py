"""The border between host and device: the only place that chooses buckets and pads.

Turns a Schedule into one packed int32 array and the names of the programs that will
read it. Knows no jax and no model.
"""

import dataclasses
from typing import Literal

import numpy as np

from headrace.configs.schema import EngineConfig
from headrace.engine.packed_layout import ROW_FIELDS, PackedLayout
from headrace.engine.schedule import (
    PrefillChunk,
    Schedule,
    pick_decode_bucket,
    pick_prefill_shape,
)

SampleVariant = Literal["greedy", "sampled", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, ready to dispatch.

    Attributes:
      packed: [W] int32, see PackedLayout.
      decode_bucket: rows of the decode call, None where nothing decodes.
      prefill_shape: (rows, tokens) of the prefill call, None where there is none.
      sample_bucket: rows of the sample call, which always runs.
      variant: the cheapest sample variant that serves every row.
    """

    packed: np.ndarray
    decode_bucket: int | None
    prefill_shape: tuple[int, int] | None
    sample_bucket: int
    variant: SampleVariant


def plan_step(
    schedule: Schedule, config: EngineConfig, layout: PackedLayout
) -> StepPlan:
    """Chooses buckets and packs what the device needs to know.

    Args:
      schedule: rows of this step, with their slots as they are after its moves.
      config: resolved; its buckets are those that the runner uses.
      layout: where the fields of the packed array lie.
    """
    packed = layout.unchanged(does_decode=bool(schedule.decode))
    if schedule.slot_sources is not None:
        layout.source(packed)[:] = schedule.slot_sources
    for slot in schedule.released:
        layout.released(packed)[slot] = 1
    shape = None
    if schedule.prefill:
        shape = pick_prefill_shape(
            config.prefill_shapes or (),
            rows=len(schedule.prefill),
            tokens=max(chunk.length for chunk in schedule.prefill),
        )
        assert shape is not None, "the scheduler picks chunks that fit a shape"
        _pack_prefill(packed, schedule.prefill, shape, layout)
    fresh = [chunk.slot for chunk in schedule.prefill if chunk.is_last]
    sampled_rows = max(
        [schedule.num_rows if schedule.decode else 1, *(slot + 1 for slot in fresh)]
    )
    sizes = config.decode_batch_sizes or ()
    return StepPlan(
        packed=packed,
        decode_bucket=(
            pick_decode_bucket(sizes, schedule.num_rows) if schedule.decode else None
        ),
        prefill_shape=shape,
        sample_bucket=pick_decode_bucket(sizes, sampled_rows),
        variant=_variant(schedule),
    )


def _variant(schedule: Schedule) -> SampleVariant:
    rows = [*schedule.decode, *(c.request for c in schedule.prefill if c.is_last)]
    if any(request.params.logprobs is not None for request in rows):
        return "full"
    if any(request.params.temperature > 0 for request in rows):
        return "sampled"
    return "greedy"


def _pack_prefill(
    packed: np.ndarray,
    chunks: tuple[PrefillChunk, ...],
    shape: tuple[int, int],
    layout: PackedLayout,
) -> None:
    rows = layout.rows(packed)
    tokens = layout.tokens(packed, *shape)
    for row, chunk in enumerate(chunks):
        request, end = chunk.request, chunk.start + chunk.length
        values = _row_values(chunk)
        rows[row, : len(ROW_FIELDS)] = [values[name] for name in ROW_FIELDS]
        stop_ids = layout.stop_ids(rows)[row]
        stop_ids[:] = -1
        stop_ids[: len(request.stop_ids)] = request.stop_ids
        layout.page_table(rows)[row, : len(request.pages)] = request.pages
        prompt = request.prompt_token_ids[chunk.start : end]
        tokens[row, : chunk.length] = prompt


def _row_values(chunk: PrefillChunk) -> dict[str, int]:
    request, params = chunk.request, chunk.request.params
    seed = request.seed % 2**64
    return {
        "slot": chunk.slot,
        "start": chunk.start,
        "length": chunk.length,
        "is_last": int(chunk.is_last),
        "max_tokens": request.max_tokens,
        "seed_low": _word(seed % 2**32),
        "seed_high": _word(seed >> 32),
        "temperature": _float_bits(params.temperature),
        "top_k": max(params.top_k, 0),
        "top_p": _float_bits(params.top_p),
    }


def _word(value: int) -> int:
    """An unsigned 32-bit word as the int32 with the same bits."""
    return value - 2**32 if value >= 2**31 else value


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
