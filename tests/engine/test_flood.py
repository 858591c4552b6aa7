"""What a flood does to others' time to the first token, counted in steps."""

import numpy as np

from headrace.scripts.bench_fairness import plan

NUM_SLOTS, NUM_FLOOD, SECONDS_PER_STEP = 16, 60, 0.02
SIZES = dict(
    num_slots=NUM_SLOTS,
    decode_batch_sizes=(NUM_SLOTS,),
    prefill_shapes=((8, 32),),
    num_pages=8 * NUM_SLOTS + 1,
)


def steps_to_first_tokens(engine, planned, num_flood):
    """By request of those planned; another tenant keeps `num_flood` more open."""
    number, open_flood, asked = 0, [], []
    last = max(one.at_s for one in planned) / SECONDS_PER_STEP
    while engine.clock_s <= last or any(r.first_token_s is None for r in asked):
        while len(open_flood) < num_flood:
            number += 1
            fields = dict(tenant="flood", arrival_s=engine.clock_s)
            open_flood.append(engine.request(f"f{number}", 40, 80, fields=fields))
            engine.add(open_flood[-1])
        while len(asked) < len(planned):
            one = planned[len(asked)]
            if one.at_s / SECONDS_PER_STEP > engine.clock_s:
                break
            fields = dict(tenant=one.tenant, arrival_s=engine.clock_s)
            lengths = len(one.prompt), one.max_tokens
            asked.append(engine.request(f"g{len(asked)}", *lengths, fields=fields))
            engine.add(asked[-1])
        if engine.step() is None and not engine.scheduler.has_work:
            continue
        open_flood = [request for request in open_flood if not request.is_finished]
        engine.requests = [r for r in engine.requests if not r.is_finished]
    return [request.first_token_s - request.arrival_s for request in asked]


def p99_ratio(engine_of, policy):
    planned = sorted(plan(4, 2.0, 16.0), key=lambda one: one.at_s)
    found = [
        np.percentile(
            steps_to_first_tokens(
                engine_of(policy=policy, num_host_pages=512, **SIZES), planned, flood
            ),
            99,
        )
        for flood in (0, NUM_FLOOD)
    ]
    return found[1] / found[0]


def test_a_flood_at_most_doubles_the_others_slowest_first_tokens(engine_of):
    assert p99_ratio(engine_of, "fair") <= 2.0


def test_without_fair_shares_it_does_more(engine_of):
    assert p99_ratio(engine_of, "fcfs") > 4.0
