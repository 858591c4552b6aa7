"""The vocabulary inside a GGUF file as a byte-level BPE of the package `tokenizers`.

How text is cut before merging is not in the file but named by it
(`tokenizer.ggml.pre`), and each name must be honoured: cutting digits apart or not
changes the ids. In llama.cpp the name also implies defaults, so it does here.
"""

import dataclasses
from collections.abc import Callable

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.checkpoints.gguf_reader import field, token_id
from headrace.checkpoints.tokenizer_spec import TokenizerSpec

_CONTROL, _USER_DEFINED = 3, 4

# Source: the split pattern published in Llama 3's tokenizer.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pre:
    """What a name under `tokenizer.ggml.pre` stands for.

    Source: llama.cpp, src/llama-vocab.cpp, llama_vocab::impl::load.

    Attributes:
      split: makes the pre-tokenizer.
      ignore_merges: a piece that is a token as a whole is that token, even where no
        merges lead to it.
      add_bos: holds where the file has no `tokenizer.ggml.add_bos_token`.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False


_PRE_TOKENIZERS = {
    "smollm": _Pre(split=_smollm),
    "llama-bpe": _Pre(split=_llama3, ignore_merges=True, add_bos=True),
    "gpt-2": _Pre(split=_gpt2),
    "default": _Pre(split=_gpt2),
}


def tokenizer_spec(reader: gguf.GGUFReader) -> TokenizerSpec:
    """Builds the tokenizer that a GGUF file carries.

    Raises:
      ValueError: no vocabulary, another model than byte-level BPE, or an unknown
        pre-tokenizer; the known ones are listed.
    """
    if reader.get_field("tokenizer.ggml.model") is None:
        raise ValueError(
            "the GGUF file has no tokenizer section (key 'tokenizer.ggml.model')"
        )
    kind = field(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; known: ['gpt2']"
        )
    name = field(reader, "tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; known: "
            f"{sorted(_PRE_TOKENIZERS)}"
        )
    pre = _PRE_TOKENIZERS[name]
    tokens = _texts(reader, "tokenizer.ggml.tokens")
    merges = _texts(reader, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(_byte_pairs(tokens, merges, pre.ignore_merges))
    tokenizer.pre_tokenizer = pre.split()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, reader, tokens)
    template = field(reader, "tokenizer.chat_template", "")
    if not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be text, got {template!r}")
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        chat_template=template or None,
        bos_token=_text_of(reader, "bos", tokens),
        eos_token=_text_of(reader, "eos", tokens),
        add_bos=bool(field(reader, "tokenizer.ggml.add_bos_token", pre.add_bos)),
    )


def _add_special_tokens(
    tokenizer: Tokenizer, reader: gguf.GGUFReader, tokens: list[str]
) -> None:
    types = field(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must have one entry for each of the "
            f"{len(tokens)} tokens"
        )
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])


def _text_of(reader: gguf.GGUFReader, name: str, tokens: list[str]) -> str | None:
    found = token_id(reader, name)
    if found is None:
        return None
    if not 0 <= found < len(tokens):
        raise ValueError(
            f"tokenizer.ggml.{name}_token_id must be at least 0 and at most "
            f"{len(tokens) - 1}, got {found}"
        )
    return tokens[found]


def _texts(reader: gguf.GGUFReader, key: str) -> list[str]:
    found = field(reader, key)
    if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
        raise ValueError(f"{key} must be a list of texts")
    return found


def _byte_pairs(
    tokens: list[str], merges: list[str], ignore_merges: bool
) -> models.BPE:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"tokenizer.ggml.merges is damaged: {error}") from None
