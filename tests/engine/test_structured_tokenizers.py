"""Structured output behind several kinds of tokenizer, and those it cannot read."""

import json
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
import tokenizers
from grammar_walks import FAST, SCHEMA, allowed, byte_level, walk
from tokenizers import decoders, models, normalizers

from headrace.engine.grammar_tokens import GrammarTokens
from headrace.engine.structured import GrammarCompiler
from headrace.engine.structured_params import StructuredOutputsParams as Params


def _compiler(tokenizer_json, vocab_size, stop_ids=()):
    return GrammarCompiler(GrammarTokens(tokenizer_json, vocab_size, stop_ids))


def byte_fallback():
    """As SentencePiece models are converted: ▁ for a space, <0x41> for a byte."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {text: len(vocab) + i for i, text in enumerate(["▁", "a", "b", "▁a", "é"])}
    model = models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    fast = tokenizers.Tokenizer(model)
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return fast


def test_sentencepiece_tokenizer_with_byte_fallback_writes_the_language():
    fast = byte_fallback()
    size = fast.get_vocab_size()
    made = _compiler(fast.to_str(), size, [2])
    words = -(-size // 32)
    state = made.compile(Params(choice=["b a", "é", "日"]))
    # Characters as such, or the bytes of their UTF-8.
    names = {fast.id_to_token(i) for i in allowed(state, words)}
    assert names == {"b", "<0x62>", "é", "<0xC3>", "<0xE6>"}
    state.advance(fast.token_to_id("b"))
    names = {fast.id_to_token(i) for i in allowed(state, words)}
    assert names == {"▁", "▁a", "<0x20>"}
    params = Params(json=SCHEMA, disable_any_whitespace=True)
    rng = np.random.default_rng(1)
    for _ in range(5):
        ids = walk(made.compile(params), rng, words, stop_id=2)
        jsonschema.validate(json.loads(fast.decode(ids)), SCHEMA)


def test_tokenizer_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="tokenizer_json"):
        _compiler("{}", 9)
    no_bytes = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(NotImplementedError, match="byte-level"):
        _compiler(no_bytes.to_str(), 9)
    gaps = byte_level()
    model = json.loads(gaps.to_str())
    model["model"]["vocab"]["foo"] = 400
    with pytest.raises(NotImplementedError, match="gaps"):
        _compiler(json.dumps(model), 500)
    # Here llguidance would write ▁ where the tokenizer writes a space.
    other = byte_fallback()
    other.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    with pytest.raises(NotImplementedError, match="llguidance reads"):
        _compiler(other.to_str(), 500)


@pytest.mark.real_model
def test_real_tokenizer_writes_valid_json_and_nothing_that_is_special(
    smollm2_tokenizer,
):
    fast = smollm2_tokenizer._fast
    size = smollm2_tokenizer.vocab_size
    real = _compiler(fast.to_str(), size, [2])
    words = -(-size // 32)
    rng = np.random.default_rng(0)
    for _ in range(20):
        state = real.compile(Params(json=SCHEMA, disable_any_whitespace=True))
        ids = walk(state, rng, words, stop_id=2)
        jsonschema.validate(json.loads(smollm2_tokenizer.decode(ids)), SCHEMA)
    anything = allowed(real.compile(Params(regex="(?s).*")), words)
    special = {i for i, t in fast.get_added_tokens_decoder().items() if t.special}
    assert special and not anything & special
    assert len(anything) > size - 300
    state = real.compile(Params(choice=["Hello there"]))
    names = {fast.id_to_token(i) for i in allowed(state, words)}
    assert {"H", "He", "Hello"} <= names
    assert all("Hello there".startswith(name) for name in names)


@pytest.mark.parametrize("vocab_size, words", [(262, 9), (256, 8), (250, 8)])
def test_model_with_fewer_rows_than_the_tokenizer_has_ids(vocab_size, words):
    few = _compiler(FAST.to_str(), vocab_size)
    found = allowed(few.compile(Params(regex="(?s).*")), words)
    assert found and max(found) < min(vocab_size, 261)


def test_end_token_is_no_text_even_where_it_is_not_marked_special():
    fast = byte_level()
    fast.add_tokens(["END"])
    any_text = Params(regex="(?s).*")
    marked = _compiler(fast.to_str(), 264, [263])
    assert 263 not in allowed(marked.compile(any_text), 9)
    assert 263 in allowed(marked.compile(any_text), 9, stop_ids=[263])
    plain = _compiler(fast.to_str(), 264)
    assert 263 in allowed(plain.compile(any_text), 9)


def test_library_is_imported_with_the_first_compiler_only():
    code = (
        "import sys, headrace.engine.structured; sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
