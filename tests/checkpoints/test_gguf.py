"""GGUF files: weights, config, tokenizer, and what damaged ones say."""

import hashlib

import gguf
import numpy as np
import pytest

from headrace.checkpoints.load import load_checkpoint


def test_weights_and_config_arrive_bit_equal(
    tensors, write_gguf, assert_holds, tiny_model
):
    path = write_gguf(tensors)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config == tiny_model
    assert_holds(checkpoint.params, tensors)
    assert checkpoint.identity == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parameters_do_not_depend_on_the_file_once_loaded(
    tensors, write_gguf, assert_holds
):
    path = write_gguf(tensors)
    params = load_checkpoint(path).params
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    assert_holds(params, tensors)


def test_end_of_turn_is_a_stop_id_too(tensors, write_gguf):
    path = write_gguf(tensors, edit=lambda writer: writer.add_eot_token_id(4))
    assert load_checkpoint(path).config.stop_ids == (6, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"architecture": "mamba"}, r"'mamba' is not supported; known: \['llama'\]"),
        ({"pre": "odd"}, r"'odd' is not supported; known: \['default', 'gpt-2'"),
        ({"extra": ["rope_freqs.weight"]}, "stretches its rotary wavelengths"),
        ({"extra": ["blk.0.attn_q.bias"]}, "does not know: .*q_proj.bias"),
    ],
)
def test_unsupported_file_is_refused_by_name(tensors, write_gguf, options, message):
    path = write_gguf(tensors, **options)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


LINEAR = gguf.RopeScalingType.LINEAR


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn' is not"),
        (
            lambda w: [w.add_rope_scaling_type(LINEAR), w.add_rope_scaling_factor(4.0)],
            "'linear' is supported with the factor 1 only, got 4.0",
        ),
        (lambda w: w.add_rope_scaling_factor(2.0), "factor 1 only, got 2.0"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 8.0), "1 only, got 8.0"),
        (lambda w: w.add_rope_scaling_attn_factors(1.5), "attn_factor must be 1, got"),
        (lambda w: w.add_rope_dimension_count(4), "must be the head's 8, .* got 4"),
    ],
)
def test_rotation_that_is_not_computed_is_refused(tensors, write_gguf, edit, message):
    """These keys used to be ignored: the model ran with the plain rotation."""
    with pytest.raises(ValueError, match=f"model.gguf: llama.rope.*{message}"):
        load_checkpoint(write_gguf(tensors, edit=edit))


@pytest.mark.parametrize(
    "kind, factor", [(gguf.RopeScalingType.NONE, 4.0), (LINEAR, 0.0), (LINEAR, 1.0)]
)
def test_scaling_that_changes_nothing_is_accepted(
    tensors, write_gguf, tiny_model, kind, factor
):
    def edit(writer):
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_dimension_count(8)

    assert load_checkpoint(write_gguf(tensors, edit=edit)).config == tiny_model


@pytest.mark.parametrize(
    "share, part",
    [(0.001, "header"), (0.01, "header"), (0.3, "tensors"), (0.999, "tensors")],
)
def test_truncated_file_is_refused_with_path_and_size(tensors, write_gguf, share, part):
    path = write_gguf(tensors)
    whole = path.read_bytes()
    size = int(len(whole) * share)
    path.write_bytes(whole[:size])
    message = rf"model.gguf is truncated: it has {size:,} bytes, its {part} .* byte \d"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_damaged_header_is_a_value_error(tensors, write_gguf):
    path = write_gguf(tensors)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(40):
        broken = bytearray(whole)
        for place in rng.integers(4, 1500, 20):
            broken[place] = rng.integers(256)
        path.write_bytes(broken)
        try:
            load_checkpoint(path)
        except ValueError:
            refused += 1
    assert refused >= 30


def test_other_file_is_no_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ValueError, match="is no GGUF file: it starts with"):
        load_checkpoint(path)


def test_missing_tensor_is_named_with_the_file(tensors, write_gguf):
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    with pytest.raises(ValueError, match=rf"model.gguf: .* lacks {name}"):
        load_checkpoint(write_gguf(tensors))
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="lacks the matrix token_embd.weight"):
        load_checkpoint(write_gguf(tensors))


def _patched(path, key, value):
    """Replaces the four bytes of a uint32 that follow a key and its type."""
    content = bytearray(path.read_bytes())
    place = content.index(key.encode()) + len(key) + 4
    content[place : place + 4] = value.to_bytes(4, "little")
    path.write_bytes(content)
    return path


def test_absurd_layer_count_is_refused_without_building_it(tensors, write_gguf):
    """Used to make one entry per layer first: minutes and gigabytes for one byte."""
    path = _patched(write_gguf(tensors), "llama.block_count", 0x7F000002)
    with pytest.raises(ValueError, match="says 2130706434 layers, .* than 20 tensors"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("llama.attention.head_count", 0, "num_heads must be at least 1, got 0"),
        ("tokenizer.ggml.bos_token_id", 99, "bos_id must be .* at most 6, got 99"),
    ],
)
def test_number_out_of_range_is_refused(tensors, write_gguf, key, value, message):
    path = _patched(write_gguf(tensors), key, value)
    with pytest.raises(ValueError, match=f"model.gguf: {message}"):
        load_checkpoint(path)


def test_number_of_another_type_is_refused(tensors, write_gguf):
    path = write_gguf(tensors)
    content = path.read_bytes()
    key = b"llama.block_count"
    as_float = content.replace(key + b"\x04", key + b"\x06")  # GGUF uint32, float32
    path.write_bytes(as_float)
    with pytest.raises(ValueError, match="block_count' must hold a whole number"):
        load_checkpoint(path)
