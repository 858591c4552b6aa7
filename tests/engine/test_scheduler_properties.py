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


PREFIXES = [tuple((3 * i + k) % 11 for i in range(64)) for k in range(2)]


@dataclasses.dataclass(frozen=True)
class Visitor:
    """An arrival with all that the full scheduler knows of a request."""

    prefix: int
    shared_len: int
    own_len: int
    max_tokens: int
    step: int
    has_stops: bool
    priority: int
    tenant: str | None
    deadline: int | None
    aborted_after: int | None
    n: int


@st.composite
def full_configs(draw):
    config = draw(configs(policies=("fcfs", "priority", "fair", "static")))
    config["numerics"] = draw(st.sampled_from(["invariant", "fast"]))
    config["num_host_pages"] = draw(st.sampled_from([0, 24, 60]))
    config["prefix_cache"] = draw(st.booleans())
    config["caches_output"] = draw(st.booleans())
    config["num_pages"] = draw(st.integers(8, 14))
    config["ageing_s"] = 3.0
    config["max_queue_delay_s"] = draw(st.sampled_from([0.0, 2.0]))
    config["max_tokens_per_step"] = draw(st.none() | st.integers(1, 60))
    return config


VISITOR = st.builds(
    Visitor,
    prefix=st.integers(0, 1),
    shared_len=st.sampled_from([0, 16, 17, 48, 64]),
    own_len=st.sampled_from([0, 1, 5, 12]),
    max_tokens=st.sampled_from([1, 5, 30, 60]),
    step=st.integers(0, 12),
    has_stops=st.sampled_from([False, False, True]),
    priority=st.integers(-1, 1),
    tenant=st.sampled_from([None, "a", "b"]),
    deadline=st.sampled_from([None] * 6 + [1, 5, 20]),
    aborted_after=st.sampled_from([None] * 6 + [0, 4, 12]),
    n=st.sampled_from([1, 1, 1, 2, 5]),
)


@hypothesis.settings(max_examples=800, deadline=None)
@hypothesis.given(full_configs(), st.lists(VISITOR, max_size=14), st.booleans())
def test_sharing_and_time_limits_change_no_token(engine_of, config, visitors, lag):
    _run(engine_of, config, visitors, lag)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(
    full_configs(), st.lists(VISITOR, min_size=6, max_size=14), st.booleans()
)
def test_preemption_changes_no_token(engine_of, config, visitors, lag):
    """The same under pressure: a small pool, many slots, long outputs."""
    config |= {"num_slots": 5, "decode_batch_sizes": (5,), "num_host_pages": 60}
    config |= {"num_pages": 9, "policy": config["policy"].replace("static", "fcfs")}
    visitors = [
        dataclasses.replace(v, max_tokens=60, step=v.step // 3, has_stops=False)
        for v in visitors
    ]
    _run(engine_of, config, visitors, lag)


def _run(engine_of, config, visitors, lag):
    engine = engine_of(lag, **config)
    plan = list(enumerate(sorted(visitors, key=lambda v: v.step)))
    for step in range(40):
        for name, visitor in plan:
            if visitor.step == step:
                engine.add(_request(engine, name, visitor, step))
            if visitor.aborted_after == step - visitor.step:
                engine.scheduler.abort(str(name))
        engine.step()
    engine.run()
    engine.check_end()
    for name, happened in (
        ("preempted", engine.scheduler.num_preemptions > 0),
        ("came back from the host", engine.num_resumed > 0),
        ("cache hit", engine.manager.stats.hit_tokens > 0),
        ("forked", engine.num_forks > 0),
        ("evicted", engine.manager.stats.evictions > 0),
    ):
        hypothesis.event(f"{name}: {happened}")


def _request(engine, name, visitor, step):
    own = tuple((visitor.prefix + i) % 11 for i in range(visitor.own_len))
    prompt = (PREFIXES[visitor.prefix][: visitor.shared_len] + own) or (name % 11,)
    fields = {
        "prompt": prompt,
        "priority": visitor.priority,
        "tenant": visitor.tenant,
        "arrival_s": float(step),
    }
    if visitor.deadline is not None:
        fields["deadline_s"] = float(step + visitor.deadline)
        fields["queue_deadline_s"] = float(step + visitor.deadline // 2)
    params = {"ignore_eos": not visitor.has_stops, "n": visitor.n}
    params["presence_penalty"] = 0.5 * (name % 2)
    room = (engine.config.num_pages - 1) * 16 - len(prompt)
    max_tokens = min(visitor.max_tokens, room, 128 - len(prompt))
    return engine.request(name, len(prompt), max_tokens, fields=fields, **params)
