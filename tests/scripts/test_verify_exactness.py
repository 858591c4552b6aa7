"""verify_exactness on the two-layer model: passes, and can fail."""

import json

import pytest
from absl.testing import flagsaver

from headrace.scripts import verify_exactness as verify


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script in this process: (exit code, printed facts, errors)."""

    def whole(*words, **values):
        if not verify.FLAGS.is_parsed():
            verify.FLAGS(["verify_exactness"])
        with flagsaver.flagsaver(config="tiny", num_requests=16, **values):
            code = verify.main(["verify_exactness", *words])
        printed = capsys.readouterr()
        lines = printed.out.strip().splitlines()
        return code, json.loads(lines[-1]) if lines else None, printed.err

    return whole


def test_all_conditions_come_about_and_no_bit_differs(run):
    code, facts, _ = run("invariance")
    assert code == 0 and facts["differences"] == 0
    assert facts["preemptions"] > 0 and facts["cache_hit_tokens"] > 0
    assert len(facts["decode_buckets"]) == 2


def test_one_changed_bit_fails_it(run, monkeypatch):
    real = verify._result

    def nudged(output):
        tokens, bits = real(output)
        if output.request_id == "50":
            bits[-1][0] = (bits[-1][0][0], "0x0p+0")
        return tokens, bits

    monkeypatch.setattr(verify, "_result", nudged)
    code, facts, _ = run("invariance")
    assert code == 1 and facts["differences"] == 1


def test_condition_that_never_came_about_fails_it(run):
    code, facts, errors = run("invariance", host_kv_bytes=0)
    assert code == 1 and facts["differences"] == 0
    assert "a preemption never came about" in errors


def test_it_has_to_be_said_what_to_verify(run):
    code, _, errors = run("speed")
    assert code == 1 and "'invariance', got ['speed']" in errors
