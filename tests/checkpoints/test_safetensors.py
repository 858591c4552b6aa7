"""Hugging Face folders: weights, config, tokenizer, and what damaged ones say."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.checkpoints.load import load_checkpoint

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


def test_weights_and_config_arrive_bit_equal(
    tensors, write_folder, assert_holds, tiny_model
):
    checkpoint = load_checkpoint(write_folder(tensors))
    assert checkpoint.config == tiny_model
    assert_holds(checkpoint.params, tensors)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_types_widen_without_loss(tensors, write_folder, assert_holds, dtype):
    short = {name: array.astype(dtype) for name, array in tensors.items()}
    params = load_checkpoint(write_folder(short)).params
    assert params["embedding"].dtype == np.float32
    assert_holds(params, {n: a.astype(np.float32) for n, a in short.items()})


def test_shards_are_joined(tensors, write_folder, assert_holds):
    folder = write_folder(tensors)
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(load_checkpoint(folder).params, tensors)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks the shards .*b.safetensors"):
        load_checkpoint(folder)


def test_identity_changes_with_one_weight(tensors, write_folder):
    before = load_checkpoint(write_folder(tensors)).identity
    assert load_checkpoint(write_folder(tensors)).identity == before
    tensors["model.norm.weight"][0] += 1
    assert load_checkpoint(write_folder(tensors)).identity != before


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 9.0},
        {"rope_parameters": {**LLAMA3, "rope_theta": 9.0}},
    ],
)
def test_llama3_stretching_is_read_in_either_form(tensors, write_folder, config):
    found = load_checkpoint(write_folder(tensors, **config)).config
    assert found.rope_base == 9.0
    assert found.rope_scaling.factor == 8.0
    assert found.rope_scaling.low_freq_factor == 1.0
    assert found.rope_scaling.high_freq_factor == 4.0
    assert found.rope_scaling.original_context_len == 16


def test_stop_ids_of_both_files_are_joined(tensors, write_folder):
    folder = write_folder(tensors, eos_token_id=[6, 2])
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert load_checkpoint(folder).config.stop_ids == (6, 2, 3)


def test_missing_head_dim_is_the_model_width_over_the_heads(tensors, write_folder):
    found = load_checkpoint(write_folder(tensors, head_dim=None)).config
    assert found.head_dim == 8


def test_template_of_its_own_file_wins(tensors, write_folder):
    folder = write_folder(tensors)
    spec = load_checkpoint(folder).tokenizer
    assert (spec.chat_template, spec.bos_token, spec.add_bos) == ("T", "<s>", False)
    (folder / "chat_template.jinja").write_text("OWN")
    assert load_checkpoint(folder).tokenizer.chat_template == "OWN"


@pytest.mark.parametrize(
    "config, message",
    [
        ({"architectures": ["Mamba"]}, r"\['Mamba'\] are not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "llama3"}}, "lacks the keys"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type None is not supported"),
        ({"rope_scaling": "x"}, "rope_scaling must be a JSON object, got 'x'"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "config.json: .*factor must be"),
        ({"rope_theta": None}, "rope_theta must be a number, got None"),
        ({"architectures": 5}, "architectures 5 are not supported"),
        ({"eos_token_id": [[6]]}, r"must hold whole numbers, got \[6\]"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, .* than 20 tensors"),
        ({"hidden_size": None}, r"lacks the whole numbers \['hidden_size'\]"),
        ({"intermediate_size": 65}, r"gate_proj.weight has shape \(64, 32\)"),
        ({"eos_token_id": 7}, "config.json: stop_ids must be at least 0 and at most 6"),
    ],
)
def test_unsupported_config_is_refused(tensors, write_folder, config, message):
    folder = write_folder(tensors, **config)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_missing_and_unused_tensors_are_named(tensors, write_folder):
    name = "model.layers.1.mlp.up_proj.weight"
    array = tensors.pop(name)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_checkpoint(write_folder(tensors))
    tensors[name] = array
    tensors["model.layers.0.self_attn.q_norm.weight"] = array
    with pytest.raises(ValueError, match="does not know: .*q_norm.weight"):
        load_checkpoint(write_folder(tensors))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bos_token": 3}, "tokenizer_config.json: bos_token must be text, got 3"),
        ({"eos_token": {"content": 3}}, "eos_token must be text"),
        ({"chat_template": 1.5}, "chat_template must be text, got 1.5"),
        ({"chat_template": [{"name": "default"}, 1]}, None),
    ],
)
def test_odd_tokenizer_settings_are_refused(tensors, write_folder, settings, message):
    folder = write_folder(tensors)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if message is None:
        assert load_checkpoint(folder).tokenizer.chat_template is None
        return
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja"])
def test_text_that_is_no_utf8_names_its_file(tensors, write_folder, file):
    folder = write_folder(tensors)
    (folder / file).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name, message", [(1, "file names, got 1"), (".", "lacks")])
def test_index_that_names_no_file_is_refused(tensors, write_folder, name, message):
    folder = write_folder(tensors)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


def test_tied_head_and_rotary_table_are_ignored(tensors, write_folder, assert_holds):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = np.ones(4, np.float32)
    assert_holds(load_checkpoint(write_folder(tensors)).params, tensors)


def test_untied_head_is_loaded(tensors, write_folder):
    folder = write_folder(tensors, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="lacks lm_head.weight"):
        load_checkpoint(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    head = load_checkpoint(write_folder(tensors, tie_word_embeddings=False)).params
    np.testing.assert_array_equal(head["head"], tensors["lm_head.weight"])


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.9])
def test_truncated_shard_is_refused_with_path_and_size(tensors, write_folder, share):
    path = write_folder(tensors) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ValueError, match="model.safetensors .* truncated or damaged"):
        load_checkpoint(path.parent)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_missing_file_is_named(tensors, write_folder, file):
    folder = write_folder(tensors)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=f"has (no|neither) {file}"):
        load_checkpoint(folder)


def test_other_storage_type_is_refused(tensors, write_folder):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(ValueError, match="model.norm.weight is stored as F64"):
        load_checkpoint(write_folder(tensors))
