"""The workload shared_prefix.jsonl on SmolLM2: its prefix is computed once."""

import pytest

from headrace import SamplingParams
from headrace.scripts.bench_throughput import load_workload

SHARED = 512  # tokens that all requests begin with, eight pages of 64


def _run(llm, prompts, params, *, uses_cache):
    loop = llm._loop
    states = [loop.submit(ids, params, uses_cache=uses_cache) for ids in prompts]
    while not all(state.is_finished for state in states):
        loop.turn()
    loop.drop(*states)
    outputs = [state.output().outputs[0] for state in states]
    return [
        (o.token_ids, [[(i, e.logprob) for i, e in one.items()] for one in o.logprobs])
        for o in outputs
    ]


@pytest.mark.real_model
def test_later_requests_compute_only_their_own_part_and_keep_their_bits(
    smollm_llm, monkeypatch
):
    prompts = load_workload("shared_prefix", 4).prompts
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
    cold = _run(smollm_llm, prompts, params, uses_cache=False)
    before = smollm_llm.stats()["counters"]["prefix_cache_hits"]
    filled = _watch_chunks(smollm_llm, monkeypatch)
    warm = _run(smollm_llm, prompts, params, uses_cache=True)
    hits = smollm_llm.stats()["counters"]["prefix_cache_hits"] - before
    assert hits == 3 * SHARED
    assert sum(filled) == sum(map(len, prompts)) - hits
    assert warm == cold


def _watch_chunks(llm, monkeypatch):
    """Lengths of the chunks that are computed from now on."""
    scheduler, lengths = llm._loop._scheduler, []
    schedule = scheduler.schedule

    def watched():
        step = schedule()
        lengths.extend(chunk.length for chunk in (step.prefill if step else ()))
        return step

    monkeypatch.setattr(scheduler, "schedule", watched)
    return lengths
