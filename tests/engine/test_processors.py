"""Penalties, biases and minimum lengths against numpy, and through the engine."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import SamplingParams
from headrace.engine.new_request import make_request
from headrace.engine.packed_layout import layout_of
from headrace.engine.processors import (
    count_tokens,
    empty_extras,
    extras_of,
    process,
    set_extras,
)
from headrace.engine.slots import empty_slots
from headrace.engine.text_rules import TokenRules

V, B = 40, 5


def truth(z, request, output, allowed):
    """What the parameters mean, for one row in float64."""
    params, prompt = request.params, request.prompt_token_ids
    stop_ids, bad_ids = request.stop_ids, request.bad_ids
    y = z.astype(np.float64)
    if params.allowed_token_ids is not None:
        y[np.setdiff1d(np.arange(len(y)), params.allowed_token_ids)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        y[token_id] += bias
    if len(output) < params.min_tokens:
        y[list(stop_ids)] = -np.inf
    for *before, last in bad_ids:
        if not before or output[-len(before) :] == before:
            y[last] = -np.inf
    y[~allowed] = -np.inf
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        y[token_id] = y[token_id] / factor if y[token_id] > 0 else y[token_id] * factor
    for token_id in set(output):
        y[token_id] -= params.frequency_penalty * output.count(token_id)
        y[token_id] -= params.presence_penalty
    return y


IDS = st.lists(st.integers(0, V - 1), max_size=12)
BAD_IDS = st.lists(
    st.lists(st.integers(0, V - 1), min_size=1, max_size=3).map(tuple), max_size=3
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 10),
        "min_tokens": st.integers(1, 8),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100)),
        "allowed_token_ids": st.lists(st.integers(0, V - 1), min_size=4, unique=True),
    },
)


@pytest.fixture(scope="module")
def tiny_with_v(tiny_config):
    model, config = tiny_config
    return dataclasses.replace(model, vocab_size=V, stop_ids=(1, 2)), config


CASES = (
    PARAMS,
    IDS.filter(len),
    IDS,
    BAD_IDS,
    st.tuples(st.integers(0, 999), st.integers(0, B - 1)),
)


@settings(max_examples=150, deadline=None)
@given(st.tuples(*CASES))
def test_any_combination_equals_numpy(tiny_with_v, case):
    _compare(*tiny_with_v, case)


@settings(max_examples=12, deadline=None)
@given(st.tuples(*CASES))
def test_any_combination_equals_numpy_at_150_000_ids(tiny_with_v, case):
    def far(ids):
        return [3749 * i for i in ids]

    params, prompt, output, bad_ids, seed_and_slot = case
    params = dict(params)
    if "allowed_token_ids" in params:
        params["allowed_token_ids"] = far(params["allowed_token_ids"])
    bias = params.get("logit_bias", {})
    params["logit_bias"] = {3749 * i: value for i, value in bias.items()}
    bad_ids = [tuple(far(ids)) for ids in bad_ids]
    model = dataclasses.replace(tiny_with_v[0], vocab_size=150_000, stop_ids=(3749,))
    case = (params, far(prompt), far(output), bad_ids, seed_and_slot)
    _compare(model, tiny_with_v[1], case)


def _compare(model, config, case):
    params, prompt, output, bad_ids, seed_and_slot = case
    (seed, slot), V = seed_and_slot, model.vocab_size
    rng = np.random.default_rng(seed)
    z = rng.choice([-np.inf, -3.0, -0.0, 0.0, 2.5, 1e4, 7.25], (B, V)).astype(
        np.float32
    )
    params = SamplingParams(max_tokens=20, **params)
    bad_ids = [tuple(output[-2:]), *bad_ids] if output else bad_ids
    rules = TokenRules(bad_ids=tuple(bad_ids))
    request = make_request(
        "r", prompt, params, model_config=model, engine_config=config, rules=rules
    )
    # The counts of half the output come from the host, the others from sampling.
    request.output_token_ids = output[: len(output) // 2]
    row = (slot + 2) % B
    first = extras_of(request, V, 4)
    extras = set_extras(
        empty_extras(B, V, 4),
        row,
        *map(jnp.asarray, first),
    )
    rows = _rows(config, request, slot, row, len(prompt) + len(output) - 1)
    for token in output[len(output) // 2 :]:
        extras = count_tokens(
            extras, rows, jnp.full(B, token, jnp.int32), jnp.ones(B, bool)
        )
    allowed = rng.random((B, V)) < 0.7
    mask_BW = np.packbits(
        np.pad(allowed, ((0, 0), (0, -V % 32))), axis=1, bitorder="little"
    ).view(np.int32)
    got = np.asarray(process(jnp.array(z), rows, extras, jnp.array(mask_BW)))
    wanted = truth(z[slot], request, output, allowed[slot])
    assert np.allclose(got[slot], wanted, rtol=1e-5, atol=1e-4)
    others = np.delete(np.arange(B), slot)
    assert got[others].tobytes() == z[others].tobytes()


def _rows(config, request, slot, row, position):
    params = request.params
    slots = empty_slots(
        dataclasses.replace(layout_of(config), num_slots=B, max_stop_ids=2)
    )

    def at(leaf, value):
        return leaf.at[slot].set(value)

    order = np.arange(B)
    order[slot], order[row] = row, slot
    return dataclasses.replace(
        slots,
        has_extras_B=at(slots.has_extras_B, True),
        position_B=at(slots.position_B, position),
        min_position_B=at(slots.min_position_B, request.prompt_len + params.min_tokens),
        presence_B=at(slots.presence_B, params.presence_penalty),
        frequency_B=at(slots.frequency_B, params.frequency_penalty),
        repetition_B=at(slots.repetition_B, params.repetition_penalty),
        stop_ids_BS=at(slots.stop_ids_BS, jnp.array(list(request.stop_ids * 2)[:2])),
        extra_row_B=jnp.array(order, jnp.int32),
    )


SPECIAL = [
    dict(repetition_penalty=3.0),
    dict(frequency_penalty=2.0, presence_penalty=1.0, temperature=0.0),
    dict(logit_bias={7: 100.0, 9: 100.0}),
    dict(allowed_token_ids=[5, 6, 11, 400]),
    dict(min_tokens=9, stop_token_ids=list(range(0, 500, 100)), ignore_eos=False),
    dict(min_p=0.5),
    dict(frequency_penalty=-2.0, temperature=0.3),
]


def _params(index):
    options = dict(ignore_eos=True, seed=index, max_tokens=16, logprobs=1)
    return SamplingParams(**options | SPECIAL[index % len(SPECIAL)])


def _bits(output):
    one = output.outputs[0]
    return one.token_ids, [[(i, e.logprob) for i, e in s.items()] for s in one.logprobs]


def test_neighbours_and_moves_change_no_bit_of_a_special_request(tiny_llm):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 512, 4 + 3 * i).tolist() for i in range(18)]
    special = [_params(i) for i in range(18)]
    plain = SamplingParams(ignore_eos=True, seed=3, max_tokens=16, temperature=0.7)
    params = [plain if i % 3 == 0 else special[i] for i in range(18)]
    together = tiny_llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = tiny_llm.generate([prompt], [one], use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        if one.logprobs is not None:
            assert _bits(alone) == _bits(output)


def test_parameters_do_what_they_say(tiny_llm):
    def tokens(**params):
        options = dict(max_tokens=30, ignore_eos=True, seed=1) | params
        (out,) = tiny_llm.generate([4, 5], SamplingParams(**options), use_tqdm=False)
        return out.outputs[0].token_ids

    assert set(tokens(allowed_token_ids=[5, 6, 11])) <= {5, 6, 11}
    assert set(tokens(logit_bias={7: 100.0, 9: 100.0})) <= {7, 9}
    assert len(set(tokens(temperature=0.0, frequency_penalty=2.0))) > len(
        set(tokens(temperature=0.0))
    )
    stops = list(range(0, 500, 63))
    short = dict(stop_token_ids=stops, allowed_token_ids=[*stops, 64])
    assert len(tokens(**short)) < 30
    late = tokens(**short, min_tokens=30)
    assert len(late) == 30 and set(late[:-1]) == {64}


def test_penalties_survive_a_preemption(tiny_config, tiny_checkpoint):
    from headrace import LLM, EngineConfig

    changes = dict(page_size=16, num_pages=24, max_context_len=192, num_slots=8)
    changes |= dict(decode_batch_sizes=(8,), host_kv_bytes=2**26)
    config = EngineConfig.from_mapping(tiny_config[1].to_mapping() | changes)
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    params = [
        dataclasses.replace(_params(i), max_tokens=60, min_tokens=0) for i in range(8)
    ]
    prompts = [[i + 1] * (5 + 7 * i) for i in range(8)]
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["counters"]["num_preemptions"] > 0
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], [one], use_tqdm=False)
        assert _bits(alone) == _bits(output)
    llm.close()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(presence_penalty=2.5), r"presence_penalty must be in \[-2.0, 2.0\]"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty must be a finite"),
        (dict(repetition_penalty=0), r"repetition_penalty must be in \[0.01"),
        (dict(min_p=1.5), r"min_p must be in \[0.0, 1.0\]"),
        (dict(min_tokens=-1), "min_tokens"),
        (dict(logit_bias={3: 101}), r"logit_bias must be in \[-100, 100\], got 101"),
        (dict(logit_bias={3: 1, "3": 2}), "logit_bias must name an id once"),
        (dict(logit_bias=[3]), "logit_bias must map ids to numbers"),
        (dict(allowed_token_ids=[]), "allowed_token_ids must hold at least one"),
        (dict(allowed_token_ids="abc"), "allowed_token_ids must be a list"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_ids_out_of_the_vocabulary_are_refused_before_any_step(tiny_llm):
    for params in (dict(logit_bias={600: 1}), dict(allowed_token_ids=[1, 600])):
        with pytest.raises(ValueError, match=r"must be whole numbers in \[0, 511\]"):
            tiny_llm.generate([1, 2], SamplingParams(**params))
    stuck = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=2)
    with pytest.raises(ValueError, match="does not end the request"):
        tiny_llm.generate([1, 2], stuck)
