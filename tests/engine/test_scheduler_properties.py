"""Whatever arrives, ends or is aborted: tokens, pages, slots and order stay right.

The Engine of conftest checks every schedule as it goes; see its `check` methods.
"""

import dataclasses

import hypothesis
from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Arrival:
    prompt_len: int
    max_tokens: int
    step: int
    has_stops: bool
    aborted_after: int | None


@st.composite
def configs(draw, policies=("fcfs", "static")):
    num_slots = draw(st.integers(1, 6))
    sizes = draw(st.sets(st.integers(1, num_slots))) | {num_slots}
    shape = st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 24]))
    shapes = draw(st.sets(shape, min_size=1, max_size=3))
    return dict(
        num_slots=num_slots,
        decode_batch_sizes=tuple(sorted(sizes)),
        prefill_shapes=tuple(sorted(shapes)),
        num_pages=draw(st.integers(5, 16)),
        prefill_calls_per_decode=draw(st.integers(1, 4)),
        policy=draw(st.sampled_from(policies)),
    )


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        prompt_len=st.integers(1, 50),
        max_tokens=st.integers(1, 14),
        step=st.integers(0, 25),
        has_stops=st.booleans(),
        aborted_after=st.none() | st.none() | st.integers(0, 12),
    ),
    max_size=12,
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(configs(), ARRIVALS, st.booleans())
def test_every_request_gets_the_tokens_it_gets_alone(engine_of, config, arrivals, lag):
    engine = engine_of(lag, **config)
    plan = list(enumerate(sorted(arrivals, key=lambda a: a.step)))
    aborts = [
        (a.step + a.aborted_after, i) for i, a in plan if a.aborted_after is not None
    ]
    for step in range(40):
        for name, arrival in plan:
            if arrival.step == step:
                params = {"ignore_eos": not arrival.has_stops}
                lens = (arrival.prompt_len, arrival.max_tokens)
                engine.add(engine.request(name, *lens, **params))
        for when, name in aborts:
            if when == step:
                engine.scheduler.abort(str(name))
        engine.step()
    engine.run()
    engine.check_end()
