"""verify_exactness on the two-layer model: passes, and can fail."""

import json

import pytest
from absl.testing import flagsaver

from headrace.scripts import rejection_trial
from headrace.scripts import speculation_trial as trial
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
    real = verify.result_of

    def nudged(output):
        tokens, bits = real(output)
        if output.request_id == "50":
            bits[-1][0] = (bits[-1][0][0], "0x0p+0")
        return tokens, bits

    monkeypatch.setattr(verify, "result_of", nudged)
    code, facts, _ = run("invariance")
    assert code == 1 and facts["differences"] == 1


def test_condition_that_never_came_about_fails_it(run):
    code, facts, errors = run("invariance", host_kv_bytes=0)
    assert code == 1 and facts["differences"] == 0
    assert "a preemption never came about" in errors


def test_it_has_to_be_said_what_to_verify(run):
    code, _, errors = run("speed")
    assert code == 1 and "'invariance' or 'speculation', got ['speed']" in errors


def test_drafts_change_no_bit_of_random_requests(run):
    code, facts, _ = run("speculation", draft="prompt-lookup")
    assert code == 0 and facts["differences"] == 0
    assert facts["num_accepted_tokens"] > 0 and facts["requests"] == 16


def test_a_draft_believed_without_a_look_fails_it(run, monkeypatch):
    real = trial.run_requests

    def altered(llm, asked):
        found = real(llm, asked)
        if llm.engine_config.draft:
            found[3][0][-1] += 1
        return found

    monkeypatch.setattr(trial, "run_requests", altered)
    code, facts, _ = run("speculation", draft="prompt-lookup")
    assert code == 1 and facts["differences"] == 1


def test_drafts_that_are_never_right_show_nothing(capsys):
    stats = dict(
        tokens_per_pass=1.0,
        num_accepted_tokens=0,
        num_draft_tokens_per_pos=[4],
        num_accepted_tokens_per_pos=[0],
    )
    assert trial.compare([([1], [])], [([1], [])], stats) == 1
    assert "no draft was accepted" in capsys.readouterr().err


REJECTION = {"draft": "self:1", "acceptance": "rejection", "numerics": "fast"}


def test_rejection_keeps_the_distribution(run):
    code, facts, _ = run("speculation", draws=100, **REJECTION)
    assert code == 0 and facts["p_value"] > 1e-3
    assert facts["num_accepted_tokens"] > 0 and facts["draws"] == 100


def test_another_distribution_fails_it(run, monkeypatch):
    real = rejection_trial.draw

    def altered(llm, draws, seed):
        found = real(llm, draws, seed)
        if llm.engine_config.draft:
            for counts in found:
                (most, _), (second, many) = counts.most_common(2)
                counts[most] += many
                counts[second] = 0
        return found

    monkeypatch.setattr(rejection_trial, "draw", altered)
    code, facts, _ = run("speculation", draws=400, **REJECTION)
    assert code == 1 and facts["p_value"] < 1e-4


def test_speculation_has_to_be_named(run):
    code, _, errors = run("speculation")
    assert code == 1 and "needs --draft" in errors
