"""The probe of sample programs: it tells a program that differs from the others."""

import dataclasses

import pytest

from headrace.engine.llm import LLM
from headrace.engine.probe_sampling import probe_sampling


@pytest.fixture(scope="module")
def runner(tiny_llm, tiny_checkpoint):
    """One that no loop drives: the probe leaves other slots than it found."""
    llm = LLM.from_checkpoint(tiny_checkpoint, config=tiny_llm.engine_config)
    yield llm._runner
    llm.close()


def _other_token(output):
    return dataclasses.replace(output, token_B=output.token_B + 1)


def _other_logprob(output):
    scores = output.scores._replace(log_total_X=output.scores.log_total_X * 1.000001)
    return dataclasses.replace(output, scores=scores)


@pytest.mark.parametrize(
    ("variant", "bucket", "change"),
    [
        ("greedy", 8, _other_token),
        ("sampled", 12, _other_token),
        ("full", 8, _other_token),
        ("full", 8, _other_logprob),
    ],
)
def test_a_program_that_differs_has_a_print_of_its_own(
    runner, monkeypatch, variant, bucket, change
):
    assert len({frozenset(found) for found in probe_sampling(runner).values()}) == 1
    real = runner.sample

    def sample(key, packed):
        output = real(key, packed)
        return change(output) if key == ("sample", variant, bucket) else output

    monkeypatch.setattr(runner, "sample", sample)
    prints = probe_sampling(runner)
    mine = prints.pop(f"sample[{variant}, {bucket}]")
    assert all(mine != other for other in prints.values())
