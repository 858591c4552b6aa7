"""The bit-class probe: it finds what it must find, and the engine acts on it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import pytest

from headrace.configs import load_config, parse_config
from headrace.engine.model_runner import ModelRunner
from headrace.engine.steps import SCORE_ROWS
from headrace.engine.warmup import warm_up
from headrace.layers.inputs import ModelOutput


@dataclasses.dataclass(frozen=True)
class ElementwiseModel:
    """A model without sums: the same bits in every shape, on every machine.

    `odd_rows` and `odd_tokens` plant a layer that rounds differently at one decode
    batch size or chunk length, `odd_decode` one that does in all of decode;
    `mixes_rows` one that reads its neighbours, `odd_starts` one whose bits depend on
    where chunks of that length start, `odd_scores` a head that rounds differently over
    as many rows as scoring gives it.
    """

    odd_rows: int = 0
    odd_tokens: int = 0
    odd_starts: int = 0
    odd_decode: bool = False
    odd_scores: bool = False
    mixes_rows: bool = False

    def apply(self, variables, *args, method=None):
        if method == "logits":
            hidden, *_ = args
            vocab = jnp.arange(variables["params"]["embedding"].shape[0])
            if self.odd_scores and hidden.shape[0] == SCORE_ROWS:
                hidden = hidden * (1 + 1e-6)
            return hidden[..., vocab % hidden.shape[-1]] * (1 + vocab % 7)
        kv_cache, inputs = args
        hidden = variables["params"]["embedding"][inputs.tokens_BT]
        rows, tokens = inputs.tokens_BT.shape
        is_odd_decode = tokens == 1 and (self.odd_decode or rows == self.odd_rows)
        if is_odd_decode or tokens == self.odd_tokens:
            hidden = hidden * (1 + 1e-6)
        if tokens == self.odd_starts:
            is_off_grid = inputs.positions_BT[:, :1, None] % tokens != 0
            hidden = jnp.where(is_off_grid, hidden * (1 + 1e-6), hidden)
        if self.mixes_rows and tokens == 1:
            hidden = hidden + 1e-3 * hidden.mean(axis=0, keepdims=True)
        return ModelOutput(hidden_BTD=hidden), kv_cache


class Runner(ModelRunner):
    """Compiles what does not depend on the model once for all tests."""

    compiled: ClassVar[dict] = {}

    def _build(self, key, stored):
        if key[0] in ("decode", "prefill", "score"):
            return super()._build(key, stored)
        if key not in self.compiled:
            entry = super()._build(key, stored)
            self.compiled[key] = (self._programs[key], entry)
        self._programs[key], entry = self.compiled[key]
        return dataclasses.replace(entry)


def _runner(tiny_checkpoint, numerics="invariant", scoring=False, **odd):
    model_config, config = parse_config(load_config("tiny"))
    config = dataclasses.replace(
        config, param_dtype="float32", kv_dtype="float32", numerics=numerics,
        num_slots=16, decode_batch_sizes=(8, 12, 16),
        prefill_shapes=((1, 16), (1, 32), (2, 64)), scoring=scoring,
    )  # fmt: skip
    runner = Runner(
        model_config, config, tiny_checkpoint.params, model=ElementwiseModel(**odd)
    )
    runner.compile_all()
    return runner


def test_a_sound_model_has_one_class_per_role(tiny_checkpoint):
    runner = _runner(tiny_checkpoint)
    config = warm_up(runner, None)
    assert config.decode_batch_sizes == (8, 12, 16)
    assert config.prefill_shapes == ((1, 16), (1, 32), (2, 64))
    assert "all 3 programs in one bit class" in runner.ledger.verdict["generating"]
    assert not runner.read(runner.slots.active_B).any()


@pytest.mark.parametrize("numerics", ["invariant", "fast"])
@pytest.mark.parametrize("odd", [{}, {"odd_decode": True}, {"odd_tokens": 64}])
def test_decoded_pages_are_cached_only_where_both_roles_agree(
    tiny_checkpoint, odd, numerics
):
    runner = _runner(tiny_checkpoint, numerics, **odd)
    warm_up(runner, None)
    classes = {e.name: e.bit_class for e in runner.ledger.entries.values()}
    is_one = classes["decode[8]"] == classes["prefill[1x16]"]
    assert is_one is ("odd_decode" not in odd)
    wanted = numerics == "fast" or is_one
    assert runner.ledger.caches_output is wanted
    again = _runner(tiny_checkpoint, numerics, **odd)
    warm_up(again, {"classes": classes})
    assert again.ledger.caches_output is wanted


def test_a_bucket_that_rounds_differently_is_found_and_kept_out(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, odd_rows=12)
    config = warm_up(runner, None)
    assert config.decode_batch_sizes == (8, 16)
    assert "2 bit classes" in runner.ledger.verdict["generating"]
    entries = runner.ledger.entries
    assert not entries["decode[12]"].used and entries["decode[8]"].used
    assert not entries["sample[greedy, 12]"].used
    assert "decode[12]" in runner.ledger.table()


def test_a_chunk_length_that_rounds_differently_is_kept_out(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, odd_tokens=64)
    config = warm_up(runner, None)
    assert config.prefill_shapes == ((1, 16), (1, 32))
    assert "2 bit classes" in runner.ledger.verdict["filling"]


def test_a_chunk_whose_bits_depend_on_its_start_is_kept_out(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, odd_starts=64)
    assert warm_up(runner, None).prefill_shapes == ((1, 16), (1, 32))
    assert runner.ledger.entries["prefill[2x64]"].bit_class.endswith("*")


def test_an_unsteady_pair_is_not_chosen_over_one_steady_shape(tiny_checkpoint):
    runner = _runner(tiny_checkpoint)
    warm_up(runner, None)
    classes = {e.name: e.bit_class for e in runner.ledger.entries.values()}
    classes |= {"prefill[1x32]": "B*", "prefill[2x64]": "B*"}
    again = _runner(tiny_checkpoint)
    assert warm_up(again, {"classes": classes}).prefill_shapes == ((1, 16),)


def test_fast_mode_keeps_every_bucket_and_still_says_so(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, "fast", odd_rows=12)
    config = warm_up(runner, None)
    assert config.decode_batch_sizes == (8, 12, 16)
    assert "2 bit classes" in runner.ledger.verdict["generating"]


def test_scores_that_generation_would_not_report_are_found(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, scoring=True)
    warm_up(runner, None)
    assert "all 6 programs in one bit class" in runner.ledger.verdict["filling"]
    odd = _runner(tiny_checkpoint, "fast", scoring=True, odd_scores=True)
    warm_up(odd, None)
    assert (
        "; A: score[1x16], score[1x32], score[2x64])" in (odd.ledger.verdict["filling"])
    )
    with pytest.raises(ValueError, match="numerics 'invariant' cannot be had"):
        warm_up(
            _runner(tiny_checkpoint, scoring=True, odd_scores=True),
            {"classes": {e.name: e.bit_class for e in odd.ledger.entries.values()}},
        )


def test_one_score_program_that_differs_is_told_apart(tiny_checkpoint, monkeypatch):
    runner = _runner(tiny_checkpoint, "fast", scoring=True)
    real = runner.forward

    def forward(key, packed):
        scores = real(key, packed)
        if key != ("score", (1, 32)):
            return scores
        return scores._replace(logprob_X=scores.logprob_X * (1 + 1e-6))

    monkeypatch.setattr(runner, "forward", forward)
    warm_up(runner, None)
    classes = {e.name: e.bit_class for e in runner.ledger.entries.values()}
    assert classes["score[1x16]"] == classes["score[2x64]"] != classes["score[1x32]"]


def test_rows_that_depend_on_their_company_are_refused(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, mixes_rows=True)
    with pytest.raises(ValueError, match="numerics 'invariant' cannot be had"):
        warm_up(runner, None)


def test_a_stored_verdict_is_used_without_probing(tiny_checkpoint):
    runner = _runner(tiny_checkpoint, odd_rows=12)
    warm_up(runner, None)
    classes = {e.name: e.bit_class for e in runner.ledger.entries.values()}
    again = _runner(tiny_checkpoint, odd_rows=12)
    before = again.logits_BQV
    assert warm_up(again, {"classes": classes}).decode_batch_sizes == (8, 16)
    assert again.logits_BQV is before and not jnp.any(before)
