"""SamplingParams and make_request refuse what cannot run and resolve the rest."""

import math

import numpy as np
import pytest

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.new_request import make_request
from headrace.engine.request import RequestStatus
from headrace.engine.sampling_params import SamplingParams

MODEL = ModelConfig(
    num_layers=1,
    model_dim=8,
    ffw_dim=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=100,
    context_len=64,
    stop_ids=(2, 3),
)
ENGINE = EngineConfig(
    max_context_len=64, page_size=16, num_pages=9, max_stop_ids=4, max_logprobs=5
)


def make(ids=(1, 5), engine=ENGINE, **params):
    return make_request(
        "r",
        ids,
        SamplingParams(**params),
        model_config=MODEL,
        engine_config=engine,
        arrival_s=1.5,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 0.001),
        ("temperature", 1000.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("top_k", True),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("logprobs", -2),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("skip_special_tokens", "yes"),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
    ],
)
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_error_names_the_value_and_the_range():
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 1.5"):
        SamplingParams(top_p=1.5)


def test_bounds_of_each_range_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=-1, seed=-(2**63), max_tokens=1)
    SamplingParams(temperature=100, top_p=1e-6, seed=2**64 - 1, max_tokens=None)


def test_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_numpy_numbers_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=[np.int32(7)]
    )
    assert type(params.temperature) is float and params.temperature == 0.5
    assert type(params.top_k) is int and params.stop_token_ids == (7,)
    assert type(params.stop_token_ids[0]) is int


def test_request_starts_waiting_with_everything_resolved():
    request = make(np.array([1, 5], np.int64), max_tokens=4, seed=-1)
    assert request.prompt_token_ids == (1, 5)
    assert {type(i) for i in request.prompt_token_ids} == {int}
    assert (request.max_tokens, request.seed, request.arrival_s) == (4, -1, 1.5)
    assert request.status is RequestStatus.WAITING and request.slot is None


def test_open_max_tokens_takes_what_the_context_leaves():
    assert make([1] * 10, max_tokens=None).max_tokens == 54


def test_open_max_tokens_is_bounded_by_the_pool():
    small = EngineConfig(max_context_len=64, page_size=16, num_pages=3)
    assert make([1] * 10, engine=small, max_tokens=None).max_tokens == 22


def test_open_seed_is_drawn_anew_with_63_bits():
    seeds = {make().seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_stop_ids_are_the_models_then_the_users_without_repeats():
    assert make(stop_token_ids=[9, 3, 9]).stop_ids == (2, 3, 9)
    assert make(stop_token_ids=[9, 3], ignore_eos=True).stop_ids == (9, 3)
    assert make(ignore_eos=True).stop_ids == ()


@pytest.mark.parametrize(
    "ids", [[-1], [100], [1, 2.0], ["a"], "ab", [True], [None], [[1]]]
)
def test_prompt_ids_out_of_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match=r"prompt_token_ids .*\[0, 99\]"):
        make(ids)


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 1 token"):
        make([])


def test_prompt_must_leave_room_for_one_token():
    assert make([1] * 63, max_tokens=1).max_tokens == 1
    with pytest.raises(ValueError, match=r"at most 63 tokens.*got 64"):
        make([1] * 64, max_tokens=1)


def test_prompt_and_max_tokens_must_fit_the_context():
    assert make([1] * 10, max_tokens=54).max_len == 64
    with pytest.raises(ValueError, match=r"at most 54 .*max_context_len.*got 55"):
        make([1] * 10, max_tokens=55)


def test_request_larger_than_the_whole_pool_is_refused():
    small = EngineConfig(max_context_len=64, page_size=16, num_pages=3)
    assert make([1] * 10, engine=small, max_tokens=22).max_len == 32
    with pytest.raises(ValueError, match=r"at most 22 .*2 pages of 16.*got 23"):
        make([1] * 10, engine=small, max_tokens=23)


def test_more_stop_ids_than_the_device_checks_are_refused():
    assert len(make(stop_token_ids=[7, 8]).stop_ids) == 4
    with pytest.raises(ValueError, match=r"max_stop_ids 4, got 5"):
        make(stop_token_ids=[7, 8, 9])


def test_stop_id_out_of_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"stop_token_ids .*\[0, 99\], got 100"):
        make(stop_token_ids=[100])


def test_more_logprobs_than_the_engine_computes_are_refused():
    make(logprobs=5)
    with pytest.raises(ValueError, match=r"logprobs must be in \[0, 5\] .*got 6"):
        make(logprobs=6)
