"""A head that is trained here drafts in the engine what it drafted in training."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver

from headrace import LLM, SamplingParams
from headrace.checkpoints.draft_heads import load_eagle
from headrace.layers import kv_cache as kv
from headrace.layers.inputs import whole_prompt
from headrace.layers.models.eagle import Eagle
from headrace.scripts import eagle_training
from headrace.scripts import train_draft_head as script


def run(folder, capsys, **values):
    """(exit code, printed lines, errors)."""
    if not script.FLAGS.is_parsed():
        script.FLAGS(["train_draft_head"])
    flags = dict(config="tiny", weights_seed=3, num_slots=8) | values
    with flagsaver.flagsaver(head=str(folder), **flags):
        code = script.main(["train_draft_head"])
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def test_a_head_trained_on_the_models_own_text_drafts_it(
    tmp_path, capsys, tiny_config, tiny_checkpoint
):
    folder, sizes = tmp_path / "head", dict(num_texts=24, text_len=64, batch_size=4)
    code, lines, _ = run(folder, capsys, num_steps=60, **sizes)
    facts = json.loads(lines[-1])
    losses = [float(one.split()[3][:-1]) for one in lines if one.startswith("step")]
    assert code == 0 and facts["texts"] == 24
    assert losses[-1] < losses[0] and facts["first_draft_right"] > 0.1
    code, lines, errors = run(folder, capsys, num_steps=1, **sizes)
    assert code == 1 and "exists already" in errors
    config = dataclasses.replace(
        tiny_config[1], draft=f"eagle:{folder}", adapts_drafts=False,
        decode_batch_sizes=(8,), num_slots=8, prefill_shapes=((1, 32),),
    )  # fmt: skip
    llm = LLM.from_checkpoint(tiny_checkpoint, config=config)
    prompts = [{"prompt_token_ids": [3 + i, 5, 7]} for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    found = llm.stats()["speculation"]
    llm.close()
    assert found["num_accepted_tokens"] > 40


def test_both_forms_of_a_head_guess_the_same(tmp_path, tiny_config):
    model = tiny_config[0]
    layer = dataclasses.replace(model, num_layers=1)
    rng = np.random.default_rng(0)
    head = {
        name: np.asarray(value)
        + rng.standard_normal(value.shape, np.float32) * np.float32(0.05)
        for name, value in eagle_training.first_params(layer, 1).items()
    }
    script.save(tmp_path / "head", head, model)
    loaded = load_eagle(str(tmp_path / "head"), model, jnp.asarray)
    # What was saved has fewer bits than what was trained.
    narrow = {name: jnp.asarray(x, jnp.bfloat16) for name, x in head.items()}
    narrow = {name: x.astype(jnp.float32) for name, x in narrow.items()}
    T, D = 70, model.model_dim
    hidden, token = (
        jnp.asarray(rng.standard_normal((1, T, D)), jnp.float32) for _ in range(2)
    )
    wanted = eagle_training.guess(narrow, layer, hidden, token)
    cache = kv.allocate(
        layer, num_pages=8, page_size=16, storage=kv.KVStorage(dtype="float32")
    )
    params = {name: x.astype(jnp.float32) for name, x in loaded.params.items()}
    inputs = whole_prompt(jnp.zeros(T, jnp.int32), 16)
    module = Eagle(loaded.config)
    found, _ = module.apply({"params": params}, cache, inputs, hidden, token)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


def test_a_folder_has_to_be_named(capsys):
    if not script.FLAGS.is_parsed():
        script.FLAGS(["train_draft_head"])
    with flagsaver.flagsaver(head=None):
        assert script.main(["train_draft_head"]) == 1
    assert "--head must name a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown arguments"):
        script.run(["x"])
