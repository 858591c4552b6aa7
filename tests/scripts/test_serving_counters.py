"""What a server counts of itself: pages and stats read, and their differences."""

import pytest

from headrace.engine.serving.prometheus import Snapshot
from headrace.scripts.serving_counters import of_page, of_stats, server_facts

PAGE = """\
# TYPE {p}:tenant_generation_tokens counter
{p}:tenant_generation_tokens_total{{tenant="a"}} 999.0
# TYPE {p}:generation_tokens counter
{p}:generation_tokens_total{{engine="0"}} 30.0
{p}:generation_tokens_total{{engine="1"}} 12.0
{p}:generation_tokens_created{{engine="1"}} 1.7e9
# TYPE {p}:kv_cache_usage_perc gauge
{p}:kv_cache_usage_perc{{engine="0"}} 0.25
# TYPE {p}:batch_efficiency histogram
{p}:batch_efficiency_bucket{{le="+Inf"}} 4.0
{p}:batch_efficiency_sum 3.5
{p}:batch_efficiency_count 4.0
# TYPE python_gc counter
python_gc_total 8.0
"""


@pytest.mark.parametrize("prefix", ["headrace", "vllm", "mine"])
def test_pages_are_read_under_any_prefix(prefix):
    assert of_page(PAGE.format(p=prefix)) == {
        "tenant_generation_tokens": 999.0,
        "generation_tokens": 42.0,
        "kv_cache_usage_perc": 0.25,
        "batch_efficiency_sum": 3.5,
        "batch_efficiency_count": 4.0,
    }


def test_pages_of_something_else_are_empty():
    assert of_page("# TYPE up gauge\nup 1.0\n") == of_page("") == {}


def test_page_and_stats_of_an_engine_say_the_same(tiny_llm):
    from prometheus_client import CollectorRegistry, generate_latest

    stats = tiny_llm.stats()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot(stats, 12, "tiny", "headrace"))
    page, state = of_page(generate_latest(registry).decode()), of_stats(stats)
    assert state.items() <= page.items()
    assert {"generation_tokens", "prefix_cache_hits", "batch_efficiency_count"} <= (
        state.keys()
    )


BEFORE = {
    "generation_tokens": 10, "time_to_first_token_seconds_count": 2,
    "batch_efficiency_sum": 1.0, "batch_efficiency_count": 2,
    "prefix_cache_hits": 8, "prefix_cache_queries": 100, "num_preemptions": 1,
}  # fmt: skip
AFTER = {
    "generation_tokens": 110, "time_to_first_token_seconds_count": 12,
    "batch_efficiency_sum": 31.0, "batch_efficiency_count": 42,
    "prefix_cache_hits": 48, "prefix_cache_queries": 300, "num_preemptions": 4,
}  # fmt: skip


def test_differences_by_hand():
    samples = [{"kv_cache_usage_perc": 0.2}, {"kv_cache_usage_perc": 0.6}]
    # 100 tokens, 10 of them first ones; 40 decode steps of 3 slots.
    assert server_facts(BEFORE, AFTER, num_slots=3, samples=samples) == {
        "prefix_hit_percent": 20.0,
        "batch_efficiency": 0.75,
        "slot_efficiency": 0.75,
        "preemptions": 3,
        "mean_kv_usage_percent": 40.0,
        "peak_kv_usage_percent": 60.0,
    }


def test_what_a_server_does_not_show_is_none():
    assert set(server_facts(None, None).values()) == {None}
    assert server_facts(BEFORE, AFTER)["slot_efficiency"] is None
    other = {"prefix_cache_hits": 5, "prefix_cache_queries": 10}
    facts = server_facts({"prefix_cache_hits": 0, "prefix_cache_queries": 0}, other)
    assert facts["prefix_hit_percent"] == 50.0
    assert [name for name, value in facts.items() if value is not None] == [
        "prefix_hit_percent"
    ]


def test_a_run_that_looked_nothing_up_has_no_hit_rate():
    assert server_facts(BEFORE, BEFORE, num_slots=3)["prefix_hit_percent"] is None
    assert server_facts(BEFORE, BEFORE, num_slots=3)["preemptions"] == 0
