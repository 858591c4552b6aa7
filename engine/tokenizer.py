"""Text to token ids and back, behind one Protocol. Host side, no jax."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from headrace.checkpoints.tokenizer_spec import TokenizerSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer.

    Attributes:
      vocab_size: ids it knows, added tokens included.
      chat_template: jinja2 source, None where the model has none.
      bos_token, eos_token: their text, None where the model has none.
      byte_token_ids: tokens for single bytes (`<0xE4>`) that the decoder joins into
        characters run by run; empty for byte-level tokenizers.
    """

    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    byte_token_ids: frozenset[int]

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids of a text; `add_bos` is for models that want one."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """The tokenizer as text for `tokenizers.Tokenizer.from_str`."""
        ...


class HFTokenizer:
    """A `tokenizers` tokenizer with the facts that lie beside it.

    Args:
      spec: as a checkpoint brings it.

    Raises:
      ValueError: the spec's JSON is no tokenizer, or its first token is unknown.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        # An engine that takes ids alone does without the package.
        from tokenizers import Tokenizer as FastTokenizer

        try:
            self._fast = FastTokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # the Rust side raises nothing narrower
            raise ValueError(f"tokenizer_json must hold a tokenizer: {error}") from None
        # A file may carry the settings of its training; a prompt is never cut.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)
        self.chat_template = spec.chat_template
        self.bos_token, self.eos_token = spec.bos_token, spec.eos_token
        self.byte_token_ids = _byte_token_ids(self._fast, spec.tokenizer_json)
        self._bos_id = None
        if spec.add_bos:
            self._bos_id = self._fast.token_to_id(spec.bos_token or "")
            if self._bos_id is None:
                raise ValueError(
                    f"the tokenizer adds a first token {spec.bos_token!r}, which its "
                    f"vocabulary lacks"
                )

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Token ids; special tokens written in the text are recognised.

        The post-processor of the file is left out: what it would add is `add_bos`.

        Args:
          text: plain text, or a rendered chat (with `add_bos=False`: it brings its
            own first token).
          add_bos: put the first token in front, if the model wants one.

        Raises:
          ValueError: `text` is no str, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be valid Unicode: {error}") from None
        ids = self._fast.encode(text, add_special_tokens=False).ids
        wants = add_bos and self._bos_id is not None
        return [self._bos_id, *ids] if wants else ids  # type: ignore[list-item]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with no clean-up of spaces."""
        return self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """As it is used: without cuts and padding."""
        return self._fast.to_str()


def _byte_token_ids(fast: "FastTokenizer", tokenizer_json: str) -> frozenset[int]:
    """Ids of `<0x00>`..`<0xFF>`, if the file's decoder treats them as bytes."""
    if not re.search(r'"type"\s*:\s*"ByteFallback"', tokenizer_json):
        return frozenset()
    ids = (fast.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(token_id for token_id in ids if token_id is not None)
