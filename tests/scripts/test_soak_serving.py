"""The soak of a server, for a minute; and that each of its checks can fail."""

import collections

import pytest
from absl.testing import flagsaver

from headrace.scripts import soak_grpc, soak_http, soak_serving
from headrace.scripts.soak_tally import ALLOWED, Tally, growth_percent
from headrace.scripts.trial_process import parse_gauges


@pytest.fixture
def run(capsys):
    """Runs the script: (exit code, what it printed)."""

    def whole(**values):
        if not soak_serving.FLAGS.is_parsed():
            soak_serving.FLAGS(["soak_serving"])
        with flagsaver.flagsaver(**values):
            code = soak_serving.main([])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return whole


def test_a_minute_of_two_hundred_clients_harms_nobody(run):
    # Memory of the first minutes says little: the allocator still settles.
    code, printed = run(soak_minutes=0.8, clients=200, max_growth_percent=10.0)
    assert code == 0, printed
    kinds = {line[:22].strip() for line in printed.splitlines()}
    # What is rare may not come in a minute on a slow machine.
    assert len(kinds & set(ALLOWED)) >= len(ALLOWED) - 6, printed
    assert " 0 preemptions" not in printed


def test_shares_of_calls_are_percents_and_every_kind_may_end_somehow():
    kinds = {**soak_grpc.KINDS, **soak_http.KINDS}
    assert sum(share for share, _ in kinds.values()) == 100
    disconnects = [s for k, (s, _) in kinds.items() if "disconn" in k or "drop" in k]
    assert sum(disconnects) == 30
    assert set(kinds) | {"canary", "grpc at shutdown"} == set(ALLOWED)
    never = {"HUNG", "INTERNAL", "UNKNOWN", "500", "OK:error", "OK:nothing"}
    assert not never & frozenset().union(*ALLOWED.values())


def test_a_status_that_a_kind_may_not_have_is_told():
    tally = Tally()
    for status in ("OK:length", "OK:stop", "INTERNAL", "HUNG", "INTERNAL"):
        tally.count("grpc stream", status)
    tally.count("grpc malformed", "INVALID_ARGUMENT")
    assert tally.num_calls == 6
    assert tally.unexpected() == ["grpc stream: 1 x HUNG", "grpc stream: 2 x INTERNAL"]
    assert tally.table().splitlines() == [
        "grpc malformed        1 INVALID_ARGUMENT",
        "grpc stream           1 HUNG, 2 INTERNAL, 1 OK:length, 1 OK:stop",
    ]


def test_answers_may_be_cut_short_but_not_differ():
    tally = Tally()
    for ids in ([1, 2], [], [1, 2, 3, 4], [1], [1, 2, 3]):
        tally.compare("q", ids)
    tally.compare("another", [9, 9])
    assert tally.wrong == []
    tally.compare("q", [1, 2, 3, 5])
    tally.compare("q", [2])
    assert tally.wrong == [
        "q: (1, 2, 3, 5) differs from (1, 2, 3, 4)",
        "q: (2,) differs from (1,)",
    ]


@pytest.mark.parametrize(
    "samples, percent",
    [
        ([1, 5, 100, 100, 100, 100, 100, 100], 0.0),  # the warm-up does not count
        ([100] * 4 + [100, 101, 102, 103], 2.5),
        ([100, 100, 100, 50], -50.0),
        ([100, 100, 100, 900, 100, 100, 100, 100], 0.0 - 80.0),
    ],
)
def test_growth_is_the_last_quarter_over_the_second(samples, percent):
    assert growth_percent(samples) == pytest.approx(percent)


def test_growth_of_too_few_samples_is_refused():
    with pytest.raises(ValueError, match="4 times"):
        growth_percent([1.0, 2.0, 3.0])


def test_gauges_are_read_and_samples_with_more_labels_are_not():
    text = "\n".join(
        [
            "# HELP headrace:num_requests_running running",
            'headrace:num_requests_running{engine="0",model_name="tiny"} 3.0',
            'headrace:request_success_total{engine="0",finished_reason="stop",'
            'model_name="tiny"} 8.0',
            'headrace:num_preemptions_total{engine="0",model_name="tiny"} 12.0',
        ]
    )
    found = {"num_requests_running": 3.0, "num_preemptions_total": 12.0}
    assert parse_gauges(text) == found


class _FakeServer:
    """A server whose gauges and files are what the test says."""

    keys = collections.defaultdict(str)
    grpc_address = "127.0.0.1:1"

    def __init__(self, num_files, **gauges):
        self.num_files = num_files
        idle = dict.fromkeys(soak_serving._IDLE, 0.0)
        self._gauges = {**idle, **gauges}

    async def gauges(self):
        return self._gauges


@pytest.mark.parametrize(
    "gauges, files, told",
    [
        ({}, 9, []),
        ({"kv_cache_usage_perc": 0.01}, 9, ["kv_cache_usage_perc is 0.01"]),
        ({"num_requests_waiting": 1.0}, 9, ["num_requests_waiting is 1"]),
        ({}, 10, ["10 files are open, 9 were"]),
    ],
)
def test_what_is_held_at_the_end_is_told(gauges, files, told, monkeypatch):
    async def whole():
        soak = soak_serving.Soak(_FakeServer(files, **gauges), 1)
        return await soak.held(4, 9)

    async def no_slots(self, slots):
        return []

    async def at_once(seconds):
        pass

    monkeypatch.setattr(soak_serving.Soak, "_lost_slots", no_slots)
    run_now = soak_serving.asyncio.run
    monkeypatch.setattr(soak_serving.asyncio, "sleep", at_once)
    found = run_now(whole())
    assert len(found) == len(told)
    assert all(one in what for one, what in zip(told, found, strict=True))
