"""Streamed text equals the decoded whole, however the tokens arrive."""

import functools

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.engine.detokenizer import Detokenizer
from headrace.engine.tokenizer import HFTokenizer

SAMPLES = ["hello world", "日本語の本", "🦙🦙 👩‍👩‍👧 é", "naïve café über", "नमस्ते"]


@functools.cache
def byte_level():
    """A small byte-level BPE; ids 0 and 1 are special."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(SAMPLES * 3, trainer)
    return HFTokenizer(TokenizerSpec(tokenizer_json=fast.to_str()))


@functools.cache
def byte_fallback():
    """Llama 2's kind of decoder; ids 0 and 1 are special, 2..257 single bytes."""
    vocab = {"<s>": 0, "</s>": 1}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)]:
        vocab[piece] = len(vocab)
    for piece in ["▁", "▁a", "b", "日", "▁é", "<unk>"]:
        vocab[piece] = len(vocab)
    fast = tokenizers.Tokenizer(
        models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>")
    )
    fast.add_special_tokens(["<s>", "</s>"])
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return HFTokenizer(TokenizerSpec(tokenizer_json=fast.to_str()))


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def split(ids, cuts):
    """`ids` in pieces, cut at the given places."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in zip(places, places[1:], strict=False)]


def streamed(tokenizer, pieces, skip=True):
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(piece) for piece in pieces]
    return deltas, detokenizer.flush()


def check_any_split(tokenizer, ids, cuts, skip):
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    for pieces in (split(ids, cuts), [[i] for i in ids], [ids]):
        deltas, rest = streamed(tokenizer, pieces, skip)
        assert "".join(deltas) + rest == whole


CUTS = st.lists(st.integers(0, 100), max_size=8)
# Ids 0 and 1 are special, 300 and more unknown to either tokenizer.
RANDOM_IDS = st.lists(st.integers(0, 310) | st.integers(0, 1), max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(ids=RANDOM_IDS, cuts=CUTS)
def test_any_ids_in_any_split_give_the_decoded_whole(name, skip, ids, cuts):
    check_any_split(TOKENIZERS[name](), ids, cuts, skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(text=st.text(max_size=20) | st.sampled_from(SAMPLES), cuts=CUTS)
def test_any_text_streams_without_half_characters(name, text, cuts):
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text)
    check_any_split(tokenizer, ids, cuts, True)
    if "\ufffd" not in text:
        deltas, rest = streamed(tokenizer, split(ids, cuts))
        assert "\ufffd" not in "".join(deltas) + rest


def test_character_of_several_tokens_comes_out_whole():
    tokenizer = byte_level()
    ids = [tokenizer.encode("a")[0], *bytes_of(tokenizer, "🫠")]
    assert len(ids) == 5
    deltas, rest = streamed(tokenizer, [[i] for i in ids])
    assert (deltas, rest) == (["a", "", "", "", "🫠"], "")


def bytes_of(tokenizer, text):
    """One single-byte token per byte of the text."""
    alphabet = {}
    for char in map(chr, range(0x400)):
        token_id = tokenizer._fast.token_to_id(char)
        if token_id is not None and char not in alphabet:
            alphabet[char] = token_id
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [alphabet[char] for piece, _ in encoded for char in piece]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_unfinished_character_shows_at_the_end_only(num_bytes):
    tokenizer = byte_level()
    ids = [tokenizer.encode("a")[0], *bytes_of(tokenizer, "🫠")[:num_bytes]]
    deltas, rest = streamed(tokenizer, [[i] for i in ids])
    assert "".join(deltas) == "a"
    assert rest == "\ufffd"


def test_plain_words_come_out_with_their_own_token():
    tokenizer = byte_level()
    ids = tokenizer.encode("hello world")
    deltas, rest = streamed(tokenizer, [[i] for i in ids])
    assert all(deltas) and rest == ""


def test_run_of_bytes_that_turns_invalid_late_is_not_emitted_early():
    # Llama 2's decoder makes the whole run invalid: nothing of it was certain.
    tokenizer = byte_fallback()
    ids = [2 + byte for byte in "é".encode() + b"\xff"] + [259]
    deltas, rest = streamed(tokenizer, [[i] for i in ids])
    assert deltas == ["", "", "", "\ufffd\ufffd\ufffd a"]
    assert rest == ""


def test_character_after_a_long_push_is_not_held_back():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    detokenizer.push(tokenizer.encode("hello world " * 100))
    deltas = [detokenizer.push([i]) for i in bytes_of(tokenizer, "🫠")]
    assert deltas == ["", "", "", "🫠"]


def test_space_in_front_of_a_word_survives_a_decoder_that_strips_the_first():
    word = 259  # "▁a"
    assert streamed(byte_fallback(), [[word], [word]]) == (["a", " a"], "")


def test_flush_after_everything_is_out_is_empty():
    detokenizer = Detokenizer(byte_level(), skip_special_tokens=True)
    assert detokenizer.flush() == ""
    assert detokenizer.push(byte_level().encode("abc")) == "abc"
    assert detokenizer.flush() == detokenizer.flush() == ""


class CountingTokenizer:
    """Counts the ids that are decoded."""

    byte_token_ids = frozenset()

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded = tokenizer, 0

    def decode(self, ids, *, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["words", "invalid bytes", "skipped tokens"])
def test_cost_per_token_does_not_grow_with_the_length(kind):
    tokenizer = byte_level()
    byte = bytes_of(tokenizer, "🫠")[1]
    ids = {
        "words": tokenizer.encode("hello world " * 400),
        "invalid bytes": [byte] * 4000,
        "skipped tokens": [0] * 4000,
    }[kind]
    counting = CountingTokenizer(tokenizer)
    streamed(counting, [[i] for i in ids])
    assert counting.num_decoded < 25 * len(ids)


@pytest.mark.real_model
@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    ids=st.lists(st.integers(0, 49151), max_size=40)
    | st.lists(st.integers(0, 300), max_size=30),
    cuts=CUTS,
)
def test_real_vocabulary_streams_to_the_decoded_whole(smollm2_tokenizer, ids, cuts):
    check_any_split(smollm2_tokenizer, ids, cuts, True)
