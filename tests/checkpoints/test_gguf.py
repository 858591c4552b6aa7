"""GGUF files: weights, config, tokenizer, and what damaged ones say."""

import hashlib
import json
import pathlib

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.checkpoints.load import load_checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2_135m_greedy.json"


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


def test_tokenizer_carries_template_and_special_tokens(tensors, write_gguf):
    spec = load_checkpoint(write_gguf(tensors)).tokenizer
    assert (spec.bos_token, spec.eos_token, spec.chat_template) == ("<s>", "</s>", "T")
    assert not spec.add_bos
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    assert tokenizer.encode("a</s>b").ids == [0, 6, 1]
    assert tokenizer.decode([0, 6, 1]) == "ab"


@pytest.mark.parametrize(
    "pre, ids", [("gpt-2", [4]), ("llama-bpe", [4]), ("smollm", [2, 3])]
)
def test_pre_tokenizer_decides_whether_digits_merge(tensors, write_gguf, pre, ids):
    spec = load_checkpoint(write_gguf(tensors, pre=pre)).tokenizer
    assert Tokenizer.from_str(spec.tokenizer_json).encode("12").ids == ids


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


@pytest.mark.real_model
def test_smollm2_tokenizer_equals_the_reference_both_ways():
    section = json.loads(GOLDEN.read_text(encoding="utf-8"))["tokenizer"]
    spec = load_checkpoint("smollm2-135m-instruct").tokenizer
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    assert len(section) > 5
    for case in section:
        ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
        assert ids == case["ids"], case["text"]
        text = tokenizer.decode(case["ids"], skip_special_tokens=False)
        assert text == case["decoded"]
