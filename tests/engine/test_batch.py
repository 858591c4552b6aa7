"""The border: what the host packs is what the device's slot state then holds."""

import jax.numpy as jnp
import numpy as np
import pytest

from headrace.engine.batch import plan_step
from headrace.engine.new_request import make_request
from headrace.engine.packed_layout import layout_of
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.schedule import PrefillChunk, RowNeeds, Schedule
from headrace.engine.slots import apply_packed, empty_slots


@pytest.fixture
def make(tiny_config):
    """(slot, pages, **params) -> a request that holds that slot and those pages."""

    def build(slot, pages, prompt=range(1, 41), **params):
        request = make_request(
            str(slot),
            list(prompt),
            SamplingParams(**params),
            model_config=tiny_config[0],
            engine_config=tiny_config[1],
        )
        request.slot, request.pages = slot, pages
        return request

    return build


def _chunk(request, start=0, length=None):
    length = request.prompt_len - start if length is None else length
    return PrefillChunk(
        request=request,
        slot=request.slot,
        start=start,
        length=length,
        is_last=start + length == request.prompt_len,
    )


def _apply(config, schedule, slots=None):
    layout = layout_of(config)
    plan = plan_step(schedule, config, layout)
    slots = empty_slots(layout) if slots is None else slots
    return plan, *apply_packed(slots, jnp.array(plan.packed), layout)


def test_every_parameter_of_a_request_reaches_its_slot(tiny_config, make):
    request = make(
        5, [9, 4, 7], temperature=0.75, top_k=13, top_p=0.625, max_tokens=6,
        seed=0xFEDCBA9876543210, stop_token_ids=[77, 88], min_p=0.25, min_tokens=2,
        presence_penalty=0.5, frequency_penalty=-1.5, repetition_penalty=1.25,
    )  # fmt: skip
    schedule = Schedule(prefill=(_chunk(request),), num_rows=6)
    plan, slots, fresh = _apply(tiny_config[1], schedule)
    assert np.flatnonzero(fresh).tolist() == [5]
    assert np.flatnonzero(slots.active_B).tolist() == [5]
    assert int(slots.position_B[5]) == 39 and int(slots.remaining_B[5]) == 6
    assert float(slots.temperature_B[5]) == 0.75
    assert int(slots.top_k_B[5]) == 13 and float(slots.top_p_B[5]) == 0.625
    assert float(slots.min_p_B[5]) == 0.25 and bool(slots.has_extras_B[5])
    assert float(slots.presence_B[5]) == 0.5 and float(slots.frequency_B[5]) == -1.5
    assert float(slots.repetition_B[5]) == 1.25 and int(slots.min_position_B[5]) == 42
    assert [int(w) for w in slots.seed_B2[5]] == [0x76543210, 0xFEDCBA98]
    assert [i for i in slots.stop_ids_BS[5].tolist() if i >= 0] == [0, 77, 88]
    assert slots.page_table_BM[5].tolist()[:4] == [9, 4, 7, 0]
    layout = layout_of(tiny_config[1])
    tokens = layout.tokens(plan.packed, *plan.prefill_shape)
    assert tokens[0, :40].tolist() == list(range(1, 41)) and not tokens[0, 40:].any()


def test_a_negative_seed_keeps_its_64_bits(tiny_config, make):
    request = make(0, [1, 2, 3], seed=-2)
    schedule = Schedule(prefill=(_chunk(request),), num_rows=1)
    _, slots, _ = _apply(tiny_config[1], schedule)
    assert [int(w) for w in slots.seed_B2[0]] == [0xFFFFFFFE, 0xFFFFFFFF]


def test_a_chunk_that_is_not_the_last_changes_no_slot(tiny_config, make):
    request = make(2, [1, 2, 3])
    schedule = Schedule(prefill=(_chunk(request, 0, 32),), num_rows=3)
    plan, slots, fresh = _apply(tiny_config[1], schedule)
    assert not np.any(fresh) and not np.any(slots.active_B)
    assert plan.prefill_shape == (1, 32) and plan.decode_bucket is None


def test_a_released_slot_stops_and_a_moved_one_keeps_its_state(tiny_config, make):
    requests = [make(slot, [3 * slot + 1, 3 * slot + 2]) for slot in (0, 1, 9)]
    slots = None
    for request in requests:
        schedule = Schedule(prefill=(_chunk(request),), num_rows=10)
        _, slots, _ = _apply(tiny_config[1], schedule, slots)
    assert np.flatnonzero(slots.active_B).tolist() == [0, 1, 9]
    sources = list(range(12))
    sources[1], sources[9] = 9, 1
    schedule = Schedule(slot_sources=tuple(sources), released=(9,), num_rows=2)
    _, after, fresh = _apply(tiny_config[1], schedule, slots)
    assert np.flatnonzero(after.active_B).tolist() == [0, 1] and not np.any(fresh)
    assert after.extra_row_B.tolist() == sources
    assert after.page_table_BM[1].tolist() == slots.page_table_BM[9].tolist()


def test_a_released_slot_may_be_filled_in_the_same_step(tiny_config, make):
    first, second = make(3, [1, 2]), make(3, [5, 6])
    schedule = Schedule(prefill=(_chunk(first),), num_rows=4)
    _, slots, _ = _apply(tiny_config[1], schedule)
    schedule = Schedule(released=(3,), prefill=(_chunk(second),), num_rows=4)
    _, slots, fresh = _apply(tiny_config[1], schedule, slots)
    assert bool(slots.active_B[3]) and bool(fresh[3])
    assert slots.page_table_BM[3].tolist()[:2] == [5, 6]


@pytest.mark.parametrize(
    ("params", "variant"),
    [
        (dict(temperature=0.0), "greedy"),
        (dict(temperature=0.5), "sampled"),
        (dict(temperature=0.5, min_p=0.1), "sampled"),
        (dict(temperature=0.0, logprobs=0), "full"),
        (dict(temperature=0.0, min_tokens=1), "full"),
        (dict(temperature=0.0, logit_bias={3: 1.0}), "full"),
        (dict(temperature=0.5, presence_penalty=0.1), "full"),
    ],
)
def test_the_cheapest_variant_and_the_smallest_buckets_serve_a_step(
    tiny_config, make, params, variant
):
    request = make(1, [1, 2], **params)
    for slot, bucket in ((1, 8), (10, 12)):
        request.slot = slot
        schedule = Schedule(
            decode=(request,),
            decode_slots=np.array([slot]),
            needs=RowNeeds.of([request]),
            num_rows=slot + 1,
        )
        plan = plan_step(schedule, tiny_config[1], layout_of(tiny_config[1]))
        assert (plan.decode_bucket, plan.sample_bucket) == (bucket, bucket)
        assert plan.variant == variant and plan.prefill_shape is None
        assert plan.packed[0] == 1
