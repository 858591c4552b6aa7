"""The counts of the scheduling benchmark, exact and small."""

import dataclasses

import pytest
from absl.testing import flagsaver

from headrace.scripts import bench_scheduling as bench


@pytest.fixture(autouse=True)
def _flags():
    if not bench.FLAGS.is_parsed():
        bench.FLAGS(["bench_scheduling"])
    with flagsaver.flagsaver():
        yield


def test_fixed_lengths_gain_nothing():
    row = bench.compare("fixed", 8, 16, 64)
    assert row["gain"] == 1.0
    # Eight batches of one length: a step per token but the first, and one wasted.
    assert row["steps_static"] == row["steps_continuous"] == 8 * 148


def test_ragged_lengths_gain_without_stalls_or_lost_tokens():
    row = bench.compare("chat-short", 8, 16, 160)
    assert row["gain"] > 2 and row["slot_efficiency"] > 0.8
    assert row["kv_waste"] < 0.03
    assert row["max_stall_steps"] <= 1
    assert row["prefix_hit_over_oracle"] >= 0.95
    _, outputs = bench.draw_lengths("chat-short", 160)
    rows = row["slot_efficiency"] * row["steps_continuous"] * 8
    assert rows == pytest.approx(outputs.sum() - 160, rel=1e-3)


def test_little_memory_makes_requests_give_way_and_all_still_end():
    config = bench.engine_config("fcfs", 16, 16, 600)
    config = dataclasses.replace(config, num_pages=301, numerics="fast")
    outputs = dict.fromkeys(map(str, range(40)), 500)
    requests = [bench.make(i, tuple(range(64)), page_size=16) for i in range(40)]
    counts = bench.run(config, requests, outputs)
    assert counts.preemptions > 0
    # Whoever comes back has its next token from the prefill of all before it.
    assert counts.rows + counts.preemptions == 40 * 499
    assert all(len(request.output_token_ids) == 500 for request in requests)
