"""cost: prices, GPUs and bills against values worked out by hand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from headrace import LLM, SamplingParams
from headrace.engine.serving.prometheus import Snapshot
from headrace.scripts import cost, cost_ledger
from headrace.scripts.cost_model import Prices, capacity, token_prices

RUN = {
    "workload": "code", "model": "m", "request_rate": "inf", "completed": 100,
    "duration": 10.0, "total_input_tokens": 30_000, "total_output_tokens": 10_000,
}  # fmt: skip
LEDGER = {
    "a": {"requests": 3, "prompt_tokens": 100, "cached_prompt_tokens": 40,
          "generation_tokens": 50, "device_seconds": 90.0},
    "b": {"requests": 1, "prompt_tokens": 10, "cached_prompt_tokens": 0,
          "generation_tokens": 5, "device_seconds": 270.0},
}  # fmt: skip


def write(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return str(path)


def line_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_prices_by_hand():
    # 4,000 tokens/s at 2 x 3.60 an hour: 7.20 / 14.4 million = 0.50 a million.
    prices = Prices(per_gpu_hour=3.6, num_gpus=2)
    found = token_prices(30_000, 10_000, 10.0, prices)
    assert found["total_tokens_per_s"] == 4000
    for name in ("", "_input", "_output"):
        assert found[f"cost_per_m{name}_tokens"] == pytest.approx(0.5)
    assert found["cost_per_m_output_tokens_alone"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("options", "price_in", "price_out"),
    [
        # 0.02 for 30,000 tokens in and 10,000 out.
        ({"input_weight": 0.25}, 0.02 / 17_500 / 4, 0.02 / 17_500),
        ({"input_weight": 0}, 0, 0.02 / 10_000),
        ({"prefill_share": 0.6}, 0.012 / 30_000, 0.008 / 10_000),
    ],
)
def test_cost_is_split_as_asked(options, price_in, price_out):
    prices = Prices(per_gpu_hour=7.2, **options)
    found = token_prices(30_000, 10_000, 10.0, prices)
    assert found["cost_per_m_input_tokens"] == pytest.approx(price_in * 1e6)
    assert found["cost_per_m_output_tokens"] == pytest.approx(price_out * 1e6)


COUNTS, PARTS = st.integers(1, 10**9), st.floats(0, 1)


@settings(deadline=None)
@given(tokens_in=COUNTS, tokens_out=COUNTS, seconds=st.floats(0.1, 1e6),
       share=st.none() | PARTS, weight=PARTS)  # fmt: skip
def test_the_tokens_of_a_run_pay_for_it_whatever_the_split(
    tokens_in, tokens_out, seconds, share, weight
):
    prices = Prices(
        per_gpu_hour=2.5,
        num_gpus=4,
        input_weight=1.0 if share is not None else weight,
        prefill_share=share,
    )
    found = token_prices(tokens_in, tokens_out, seconds, prices)
    paid = found["cost_per_m_input_tokens"] * tokens_in
    paid += found["cost_per_m_output_tokens"] * tokens_out
    assert paid / 1e6 == pytest.approx(10 * seconds / 3600, rel=1e-9)


def test_gpus_by_hand():
    # 50/s x 400 tokens = 20,000; an engine of 2 gives 4,000 x 0.5; x 1.25 = 12.5.
    found = capacity(50, 400, 4000, num_gpus=2, target_utilization=0.5, redundancy=1.25)
    assert (found["gpus_exact"], found["engines_needed"]) == (25.0, 13)
    assert found["gpus_needed"] == 26
    whole = capacity(7, 1, 0.7, num_gpus=1, target_utilization=0.1, redundancy=1)
    assert whole["gpus_exact"] > 100 and whole["gpus_needed"] == 100  # rounding


def test_more_demand_never_needs_fewer_gpus_and_the_reserve_is_kept():
    for redundancy in (1.0, 1.5):
        needed = [
            capacity(
                rate, 100, 1000, num_gpus=1, target_utilization=0.7,
                redundancy=redundancy,
            )["gpus_needed"]
            for rate in (0, 1, 7, 7.1, 70, 700)
        ]  # fmt: skip
        assert needed == ([0, 1, 1, 2, 10, 100] if redundancy == 1 else
                          [0, 1, 2, 2, 15, 150])  # fmt: skip


def test_runs_are_priced_one_by_one(run_main, tmp_path, capsys):
    slower = RUN | {"duration": 20.0, "request_rate": 3.5}
    path = write(tmp_path / "r.jsonl", f"{json.dumps(RUN)}\n\n{json.dumps(slower)}\n")
    arguments = ["--price_per_hour=3.6", "--engine_gpus=2", "--redundancy=1.25"]
    arguments += ["--demand_requests_per_s=50", "--target_utilization=0.5"]
    assert run_main(cost, f"--bench={path}", *arguments) == 0
    out = capsys.readouterr().out
    first, second = json.loads(out.splitlines()[-1])["runs"]
    assert first["cost_per_m_tokens"] == pytest.approx(0.5)
    assert second["cost_per_m_tokens"] == pytest.approx(1.0)
    assert (first["tokens_per_request"], first["gpus_needed"]) == (400, 26)
    assert first["cost_per_hour"] == pytest.approx(26 * 3.6)
    assert second["gpus_needed"] == 50
    assert "price x GPUs / (tokens/s x 3600)" in out
    assert out.count("it was sent 3.5 requests/s") == 1


def test_a_tenants_bill_is_its_share_of_the_device(run_main, tmp_path, capsys):
    path = write(tmp_path / "l.json", {"counters": {}, "tenants": LEDGER})
    common = [f"--ledger={path}", "--price_per_hour=10", "--engine_gpus=2"]
    assert run_main(cost, *common) == 0
    line = line_of(capsys)
    # 20 an hour: 270 s are 1.50, 90 s are 0.50.
    assert list(line["bill"]) == ["b", "a"]
    assert line["bill"]["b"]["cost"] == pytest.approx(1.5)
    assert line["bill"]["a"] == LEDGER["a"] | {"cost": pytest.approx(0.5)}
    assert line["bill_total"]["cost"] == pytest.approx(2.0)
    assert line["bill_total"]["prompt_tokens"] == 110
    # A whole hour, idle time included, by the same shares.
    assert run_main(cost, *common, "--period_hours=1") == 0
    line = line_of(capsys)
    assert line["bill"]["b"]["cost"] == pytest.approx(15)
    assert line["bill_total"]["cost"] == pytest.approx(20)


def test_page_and_stats_of_an_engine_give_one_bill(
    tiny_llm, tiny_checkpoint, run_main, tmp_path, capsys
):
    config = tiny_llm.engine_config
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0)
    llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False)
    stats = llm.stats()
    llm.close()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Snapshot(stats, 12, "tiny", "headrace"))
    page = write(tmp_path / "page.txt", generate_latest(registry).decode())
    stats_path = write(tmp_path / "stats.json", stats)
    assert run_main(cost, f"--ledger={page}", "--price_per_hour=1") == 0
    by_page = line_of(capsys)
    assert run_main(cost, f"--ledger={stats_path}", "--price_per_hour=1") == 0
    assert line_of(capsys) == by_page
    (row,) = by_page["bill"].values()
    assert (row["prompt_tokens"], row["generation_tokens"]) == (6, 10)
    assert (
        row["cost"] == pytest.approx(row["device_seconds"] / 3600) and row["cost"] > 0
    )


def test_pages_of_several_engines_add_up(tmp_path):
    rows = [
        f'p:tenant_{name}_total{{engine="{engine}",tenant="a"}} {value}'
        for engine in (0, 1)
        for name, value in (("device_seconds", 1.5), ("prompt_tokens", 3),
                            ("generation_tokens", 4))
    ]  # fmt: skip
    found = cost_ledger.read(write(tmp_path / "p.txt", "\n".join(rows) + "\n"))
    assert found == {
        "a": {"requests": None, "prompt_tokens": 6, "cached_prompt_tokens": None,
              "generation_tokens": 8, "device_seconds": 3.0}
    }  # fmt: skip
    _, total = cost_ledger.bill(found, 1.0, 1)
    assert (total["requests"], total["generation_tokens"]) == (None, 8)


def test_a_period_is_the_difference_of_two_readings(run_main, tmp_path, capsys):
    after = json.loads(json.dumps(LEDGER))
    after["a"] |= {"device_seconds": 126.0, "prompt_tokens": 107}
    after["c"] = LEDGER["b"]
    before = write(tmp_path / "before.json", LEDGER)
    path = write(tmp_path / "after.json", after)
    flags = [f"--ledger={path}", f"--ledger_before={before}", "--price_per_hour=100"]
    assert run_main(cost, *flags) == 0
    bill = line_of(capsys)["bill"]
    assert bill["a"]["cost"] == pytest.approx(1.0) and bill["a"]["prompt_tokens"] == 7
    assert (bill["b"]["cost"], bill["c"]["cost"]) == (0, pytest.approx(7.5))
    first, second = cost_ledger.read(before), cost_ledger.read(path)
    with pytest.raises(ValueError, match="'c' is in the earlier reading alone"):
        cost_ledger.since(second, first)
    fallen = first | {"b": first["b"] | {"device_seconds": 7.0}}
    with pytest.raises(ValueError, match="fell from 270.0 to 7.0: .*started anew"):
        cost_ledger.since(first, fallen)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "bench or ledger must be given"),
        (["--bench=R"], "price_per_hour must be given"),
        (["--bench=R", "--price_per_hour=-1"],
         "price_per_hour must be finite, at least 0, got -1.0"),
        (["--bench=R", "--price_per_hour=nan"], "price_per_hour must be finite"),
        (["--bench=R", "--price_per_hour=1", "--engine_gpus=0"],
         "engine_gpus must be finite, at least 1, got 0"),
        (["--bench=R", "--price_per_hour=1", "--input_weight=-1"], "input_weight"),
        (["--bench=R", "--price_per_hour=1", "--prefill_share=1.5"],
         "prefill_share must be finite, at least 0 and at most 1, got 1.5"),
        (["--bench=R", "--price_per_hour=1", "--prefill_share=0.5",
          "--input_weight=2"], "prefill_share and input_weight must not both"),
        (["--bench=R", "--price_per_hour=1", "--demand_requests_per_s=-1"],
         "demand_requests_per_s must be finite, at least 0, got -1.0"),
        (["--bench=R", "--price_per_hour=1", "--demand_requests_per_s=1",
          "--target_utilization=0"],
         "target_utilization must be finite, above 0 and at most 1, got 0.0"),
        (["--bench=R", "--price_per_hour=1", "--demand_requests_per_s=1",
          "--redundancy=0.5"], "redundancy must be finite, at least 1, got 0.5"),
        (["--bench=R", "--price_per_hour=1", "--demand_requests_per_s=1",
          "--tokens_per_request=-3"], "tokens_per_request must be finite, above 0"),
        (["--ledger_before=L", "--bench=R"], "ledger_before needs ledger"),
        (["--ledger=L", "--price_per_hour=1", "--period_hours=0.09"],
         "period_hours must hold the 360 device seconds"),
        (["--ledger=L", "--price_per_hour=1", "--period_hours=-1"],
         "period_hours must be finite, above 0, got -1.0"),
        (["--bench=/nowhere/r.jsonl", "--price_per_hour=1"], "r.jsonl"),
    ],
)  # fmt: skip
def test_wrong_values_are_one_line(run_main, tmp_path, capsys, arguments, message):
    run = write(tmp_path / "r.jsonl", RUN)
    ledger = write(tmp_path / "l.json", LEDGER)
    arguments = [one.replace("=R", f"={run}").replace("=L", f"={ledger}")
                 for one in arguments]  # fmt: skip
    assert run_main(cost, *arguments) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: no JSON"),
        ("[1]", "line 1: completed must be a number above 0, got None"),
        (
            json.dumps(RUN) + "\n" + json.dumps(RUN | {"completed": 0}),
            "line 2: completed",
        ),
        (json.dumps(RUN | {"duration": "x"}), "duration must be a number above 0"),
        ("\n", "holds no run"),
    ],
)
def test_files_that_are_no_runs_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        cost.read_runs(write(tmp_path / "r.jsonl", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "no tenant's device_seconds"),
        ('{"tenants": {}}', "no tenant's device_seconds"),
        ("up 1.0\n", "no tenant's device_seconds"),
        ('{"a": 5}', "tenant 'a' must have fields, got 5"),
        (
            '{"a": {"prompt_tokens": 1}}',
            "generation_tokens of tenant 'a' must be a num",
        ),
        ({"a": LEDGER["a"] | {"device_seconds": -1}}, "0 or more, got -1"),
        ({"a": LEDGER["a"] | {"prompt_tokens": True}}, "got True"),
        ("{not json", "ledger .*l.txt"),
        ('p:tenant_prompt_tokens_total{tenant="a"} 5\n', "generation_tokens of tenant"),
    ],
)
def test_files_that_are_no_ledgers_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        cost_ledger.read(write(tmp_path / "l.txt", text))
