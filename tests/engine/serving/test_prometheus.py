"""The exposition holds the engine's numbers, under vLLM's names."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace import SamplingParams
from headrace.engine.serving.calls import Call
from headrace.engine.serving.prometheus import Snapshot, exposition
from headrace.engine.serving.tenants import ANONYMOUS

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def _who(labels):
    return labels.get("finished_reason") or labels.get("tenant")


def _samples(text):
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    for sample in samples:
        assert sample.labels["engine"] == "0"
    return {(s.name, s.labels.get("le"), _who(s.labels)): s.value for s in samples}


@pytest.mark.parametrize("prefix", ["headrace", "vllm"])
def test_every_number_of_the_engine_is_there_once(serve, prefix):
    async def main(service):
        await service.generate(ANONYMOUS, Call(prompt="abc", params=PARAMS))
        found = await exposition(service.engine, model_name='m "1"', prefix=prefix)
        return found, await service.engine.stats(), service.engine.llm.engine_config

    (text, content_type), stats, config = serve(main)
    assert content_type.startswith("text/plain")
    samples = _samples(text)
    wanted = {}
    for name, value in stats["counters"].items():
        if name == "request_success":
            for reason, count in value.items():
                wanted[f"{prefix}:{name}_total", None, reason] = count
        else:
            wanted[f"{prefix}:{name}_total", None, None] = value
    for name, value in stats["gauges"].items():
        wanted[f"{prefix}:{name}", None, None] = value
    usage = stats["gauges"]["kv_cache_usage_perc"]
    wanted[f"{prefix}:saturation", None, None] = max(0 / config.num_slots, usage)
    for name, found in stats["histograms"].items():
        wanted[f"{prefix}:{name}_sum", None, None] = found["sum"]
        wanted[f"{prefix}:{name}_count", None, None] = found["count"]
        for bound, count in found["buckets"].items():
            wanted[f"{prefix}:{name}_bucket", bound, None] = count
    for tenant, usage in stats["tenants"].items():
        for name, value in usage.items():
            wanted[f"{prefix}:tenant_{name}_total", None, tenant] = value
    assert samples == wanted
    assert samples[f"{prefix}:tenant_generation_tokens_total", None, "anonymous"] == 8
    assert samples[f"{prefix}:tenant_device_seconds_total", None, "anonymous"] > 0
    assert samples[f"{prefix}:request_success_total", None, "length"] == 2
    assert samples[f"{prefix}:generation_tokens_total", None, None] == 8
    assert samples[f"{prefix}:time_to_first_token_seconds_count", None, None] == 2


def test_speculation_is_counted_under_vllms_names(tiny_llm):
    drafts = dict(
        num_drafts=3,
        num_draft_tokens=8,
        num_accepted_tokens=5,
        num_accepted_tokens_per_pos=[3, 2, 0],
    )
    stats = tiny_llm.stats() | {"speculation": drafts}
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for metric in Snapshot(stats, 4, "m", "vllm").collect()
        for sample in metric.samples
        if "spec_decode" in sample.name
    }
    name = "vllm:spec_decode_num_"
    assert found == {
        (name + "drafts_total", None): 3,
        (name + "draft_tokens_total", None): 8,
        (name + "accepted_tokens_total", None): 5,
        (name + "accepted_tokens_per_pos_total", "0"): 3,
        (name + "accepted_tokens_per_pos_total", "1"): 2,
        (name + "accepted_tokens_per_pos_total", "2"): 0,
    }
    without = Snapshot(tiny_llm.stats(), 4, "m", "vllm").collect()
    assert not any("spec_decode" in metric.name for metric in without)
