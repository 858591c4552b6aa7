"""Drafts that cannot be had are refused; weights that a draft shares stay shared."""

import dataclasses

import numpy as np
import pytest

from headrace import LLM, EngineConfig
from headrace.checkpoints.orbax_store import save_store
from headrace.checkpoints.synthetic import synthetic_checkpoint
from headrace.engine.device_facts import place_params
from headrace.engine.proposer import DRAFT


def test_bad_settings_are_refused():
    for number in (0, 8):
        with pytest.raises(ValueError, match=r"num_drafts must be .*1.*7.*got"):
            EngineConfig(draft="prompt-lookup", num_drafts=number)
    for draft, message in {
        "": "draft must be 'prompt-lookup', a model",
        "self:": "needs something behind the colon",
        "self:0": "draft layers must be at least 1, got 0",
        "self:int5": "int5",
    }.items():
        with pytest.raises(ValueError, match=message):
            EngineConfig(draft=draft)
    with pytest.raises(ValueError, match="'rejection' .* needs numerics 'fast', got"):
        EngineConfig(draft="prompt-lookup", acceptance="rejection")
    with pytest.raises(ValueError, match="num_drafts must leave room .* 5, got 4"):
        EngineConfig(draft="prompt-lookup", num_drafts=4, max_context_len=5)


def test_drafts_that_do_not_fit_the_target_are_refused(
    tiny_config, tiny_checkpoint, byte_tokenizer, tmp_path
):
    model, engine = tiny_config

    def refusal(draft, **changes):
        target = dataclasses.replace(tiny_checkpoint, **changes)
        with pytest.raises(ValueError) as refused:
            LLM.from_checkpoint(target, config=dataclasses.replace(engine, draft=draft))
        return str(refused.value)

    assert "has 2, so at most self:1" in refusal("self:2")
    message = refusal("self:int8", quantization="int4-g64", quantization_skip=())
    assert "quantized already, as int4-g64" in message
    assert "no model 'nobody'" in refusal("nobody")

    def stored(name, **changes):
        other = dataclasses.replace(model, **changes)
        checkpoint = synthetic_checkpoint(other, seed=4)
        checkpoint = dataclasses.replace(checkpoint, tokenizer=byte_tokenizer)
        save_store(tmp_path / name, checkpoint)
        return str(tmp_path / name)

    message = refusal(stored("wide", vocab_size=640))
    assert "a vocabulary of 640 tokens, the target of 512" in message
    message = refusal(stored("short", context_len=256))
    assert "context_len 256 is shorter than max_context_len 512" in message
    text = byte_tokenizer.tokenizer_json.replace('"%":', '"\u2603":')
    words = dataclasses.replace(byte_tokenizer, tokenizer_json=text)
    message = refusal(stored("other"), tokenizer=words)
    assert "have other vocabularies" in message


def test_weights_that_a_draft_shares_are_moved_once():
    shared, ids = np.ones((2, 3), np.float32), np.arange(3, dtype=np.int32)
    placed = place_params({"a": shared, DRAFT: {"a": shared, "ids": ids}}, "bfloat16")
    assert placed["a"] is placed[DRAFT]["a"]
    assert placed["a"].dtype == "bfloat16" and placed[DRAFT]["ids"].dtype == "int32"
