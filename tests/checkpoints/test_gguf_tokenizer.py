"""The tokenizer inside a GGUF file: ids, special tokens, and damaged vocabularies."""

import json
import pathlib

import pytest
from tokenizers import Tokenizer

from headrace.checkpoints import registry
from headrace.checkpoints.cache_dir import cache_dir
from headrace.checkpoints.gguf_reader import open_gguf
from headrace.checkpoints.gguf_tokenizer import tokenizer_spec
from headrace.checkpoints.load import load_checkpoint
from headrace.engine.tokenizer import HFTokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2_135m_greedy.json"


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


@pytest.mark.parametrize("pre, ids", [("llama-bpe", [5, 3]), ("gpt-2", [4, 0])])
def test_llama_bpe_takes_whole_tokens_before_merges_and_starts_with_bos(
    tensors, write_gguf, pre, ids
):
    """llama.cpp implies both by the name; llama-bpe used to give [4, 0], too."""
    # No merge leads to the token `123`.
    tokens = ["3", "1", "2", "123", "12", "<s>", "</s>"]
    spec = load_checkpoint(write_gguf(tensors, pre=pre, tokens=tokens)).tokenizer
    assert HFTokenizer(spec).encode("123") == ids


def test_file_says_whether_a_prompt_starts_with_bos(tensors, write_gguf):
    def edit(writer):
        writer.add_add_bos_token(False)

    path = write_gguf(tensors, pre="llama-bpe", edit=edit)
    assert not load_checkpoint(path).tokenizer.add_bos


def test_file_without_a_tokenizer_says_so(tensors, write_gguf):
    path = write_gguf(tensors)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modex"))
    with pytest.raises(ValueError, match="model.gguf: .* has no tokenizer section"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"1 2", b"1 x", "tokenizer.ggml.merges is damaged"),
        (b"1 2", b"1_2", "tokenizer.ggml.merges is damaged"),
        (b"gpt2", b"bert", r"model 'bert' is not supported; known: \['gpt2'\]"),
    ],
)
def test_damaged_vocabulary_is_refused(tensors, write_gguf, old, new, message):
    path = write_gguf(tensors)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_token_twice_is_refused(tensors, write_gguf):
    path = write_gguf(tensors)
    one, two = b"\x01" + bytes(7) + b"a", b"\x01" + bytes(7) + b"b"
    path.write_bytes(path.read_bytes().replace(two, one))
    with pytest.raises(ValueError, match="has a token twice"):
        load_checkpoint(path)


@pytest.mark.real_model
def test_smollm2_tokenizer_equals_the_reference_both_ways():
    section = json.loads(GOLDEN.read_text(encoding="utf-8"))["tokenizer"]
    path = registry.fetch("smollm2-135m-instruct", cache_dir())
    spec = tokenizer_spec(open_gguf(path))
    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    assert len(section) > 5
    for case in section:
        ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
        assert ids == case["ids"], case["text"]
        text = tokenizer.decode(case["ids"], skip_special_tokens=False)
        assert text == case["decoded"]
