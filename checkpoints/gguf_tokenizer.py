"""The vocabulary inside a GGUF file as a byte-level BPE of the package `tokenizers`.

How text is cut before merging is not in the file but named by it
(`tokenizer.ggml.pre`), and each name must be honoured: cutting digits apart or not
changes the ids.
"""

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.checkpoints.gguf_reader import field
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


_PRE_TOKENIZERS = {
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "gpt-2": _gpt2,
    "default": _gpt2,
}


def tokenizer_spec(reader: gguf.GGUFReader) -> TokenizerSpec:
    """Builds the tokenizer that a GGUF file carries.

    Raises:
      ValueError: no vocabulary, another model than byte-level BPE, or an unknown
        pre-tokenizer; the known ones are listed.
    """
    kind = field(reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; known: ['gpt2']"
        )
    pre = field(reader, "tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; known: "
            f"{sorted(_PRE_TOKENIZERS)}"
        )
    tokens = list(field(reader, "tokenizer.ggml.tokens"))
    merges = [tuple(m.split(" ", 1)) for m in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = list(field(reader, "tokenizer.ggml.token_type", [1] * len(tokens)))
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            special = token_type == _CONTROL
            added = AddedToken(token, special=special, normalized=False)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])

    def text_of(name: str) -> str | None:
        found = reader.get_field(f"tokenizer.ggml.{name}_token_id")
        return None if found is None else tokens[int(found.contents())]

    template = reader.get_field("tokenizer.chat_template")
    add_bos = reader.get_field("tokenizer.ggml.add_bos_token")
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        chat_template=None if template is None else template.contents(),
        bos_token=text_of("bos"),
        eos_token=text_of("eos"),
        add_bos=bool(add_bos.contents()) if add_bos is not None else False,
    )
