"""HFTokenizer adds the first token once, recognises special ones and cuts nothing."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.engine import chat_template
from headrace.engine.tokenizer import HFTokenizer


def byte_level():
    """A byte-level BPE without merges: one token per byte, then two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    fast = tokenizers.Tokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


def spec_of(fast, **changes):
    values = {"bos_token": "<s>", "eos_token": "</s>", **changes}
    return TokenizerSpec(tokenizer_json=fast.to_str(), **values)


def with_post_processor():
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return fast


def test_vocabulary_counts_added_tokens():
    assert HFTokenizer(spec_of(byte_level())).vocab_size == 258


@pytest.mark.parametrize("text", ["hello", " héllo\n", "日本語 🦙", "", "a\x00b"])
def test_text_survives_encode_and_decode(text):
    tokenizer = HFTokenizer(spec_of(byte_level()))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("make", [byte_level, with_post_processor])
def test_first_token_is_added_once_and_only_if_the_model_wants_it(make):
    wants = HFTokenizer(spec_of(make(), add_bos=True))
    assert wants.encode("") == [256]
    assert wants.encode("a")[0] == 256 and wants.encode("a").count(256) == 1
    assert 256 not in HFTokenizer(spec_of(make())).encode("a")


def test_rendered_chat_gets_no_second_first_token():
    tokenizer = HFTokenizer(spec_of(with_post_processor(), add_bos=True))
    ids = tokenizer.encode("<s>a</s>", add_bos=False)
    assert (ids[0], ids[-1], len(ids)) == (256, 257, 3)


def test_special_tokens_are_skipped_or_shown_on_demand():
    tokenizer = HFTokenizer(spec_of(byte_level()))
    ids = tokenizer.encode("<s>a</s>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


def test_prompt_is_neither_cut_nor_padded_by_settings_of_the_file():
    fast = byte_level()
    fast.enable_truncation(2)
    fast.enable_padding(length=8)
    assert len(HFTokenizer(spec_of(fast)).encode("hello")) == 5


@pytest.mark.parametrize("text", ["a\ud800b", b"a", None, 3])
def test_text_that_is_no_valid_str_is_refused(text):
    with pytest.raises(ValueError, match="text must be"):
        HFTokenizer(spec_of(byte_level())).encode(text)


def test_unknown_first_token_is_refused():
    with pytest.raises(ValueError, match="'<bos>'"):
        HFTokenizer(spec_of(byte_level(), bos_token="<bos>", add_bos=True))


def test_json_that_is_no_tokenizer_is_refused():
    with pytest.raises(ValueError, match="tokenizer_json"):
        HFTokenizer(TokenizerSpec(tokenizer_json="{}"))


def test_byte_tokens_are_known_where_the_decoder_falls_back_to_bytes():
    assert HFTokenizer(spec_of(byte_level())).byte_token_ids == frozenset()
    vocab = {"a": 0, "<unk>": 1, "<0x41>": 2, "<0xE4>": 3}
    fast = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    assert HFTokenizer(TokenizerSpec(tokenizer_json=fast.to_str())).byte_token_ids == (
        frozenset()
    )
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = HFTokenizer(TokenizerSpec(tokenizer_json=fast.to_str()))
    assert tokenizer.byte_token_ids == {2, 3}


@pytest.mark.real_model
def test_rendered_chat_becomes_the_ids_that_the_real_model_was_trained_on(
    smollm2_tokenizer,
):
    text = chat_template.render(
        smollm2_tokenizer.chat_template, [{"role": "user", "content": "Hi"}]
    )
    ids = smollm2_tokenizer.encode(text, add_bos=False)
    assert smollm2_tokenizer.decode(ids, skip_special_tokens=False) == text
    # <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n
    assert ids[:4] == [1, 9690, 198, 2683]
    assert ids[-10:] == [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
