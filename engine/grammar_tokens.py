"""A model's tokens as llguidance sees them. Host side, no jax."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Ends texts inside the library alone, so that none of the model's tokens does.
_END_TOKEN = "<|headrace-end-of-text|>"

# Read by both tokenizer libraries when a compiler is built; they have to agree.
_PROBE = '{"a b": [1, 2]}\n\t\u00e9\u65e5'


class GrammarTokens:
    """The library's tokenizer, and which ids are text.

    Args:
      tokenizer_json: as in TokenizerSpec.
      vocab_size: rows of the model's logits; ids past the tokenizer's are never text.
      stop_ids: the model's own, never text even where not marked as special.

    Attributes:
      text_W: the bits of the ids that can be text: of the tokenizer, not special.
      num_library_words: words of the library's masks, which have its end token too.

    Raises:
      ValueError: `tokenizer_json` holds no tokenizer.
      NotImplementedError: a tokenizer whose bytes llguidance cannot tell.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, stop_ids: Sequence[int]
    ) -> None:
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as FastTokenizer

        try:
            fast = FastTokenizer.from_str(tokenizer_json)
        except Exception as error:  # the Rust side raises nothing narrower
            raise ValueError(f"tokenizer_json must hold a tokenizer: {error}") from None
        size = fast.get_vocab_size(with_added_tokens=True)
        fast.add_special_tokens([AddedToken(_END_TOKEN, special=True)])
        if max(fast.get_vocab().values(), default=-1) != size:
            raise NotImplementedError(
                f"structured outputs need a tokenizer whose {size} ids have no gaps"
            )
        self.vocab_size = vocab_size
        num_library = max(vocab_size, size + 1)
        self.num_library_words = -(-num_library // 32)
        # The library's own end token is the last of all, so none of the model's is.
        self.library = _library_tokenizer(fast.to_str(), num_library, size)
        is_text = np.zeros(32 * -(-vocab_size // 32), bool)
        is_text[: min(size, vocab_size)] = True
        added = [i for i in fast.get_added_tokens_decoder() if i < vocab_size]
        is_text[[i for i in added if self.library.is_special_token(i)]] = False
        is_text[list(stop_ids)] = False
        self.text_W = np.packbits(is_text, bitorder="little").view("<u4")
        ids = fast.encode(_PROBE, add_special_tokens=False).ids
        ids = [i for i in ids if i < vocab_size and is_text[i]]
        read = self.library.decode_str(ids)
        if read.lstrip() != fast.decode(ids).lstrip():
            raise NotImplementedError(
                f"structured outputs cannot read this tokenizer: the text of {ids} is "
                f"{fast.decode(ids)!r}, llguidance reads {read!r}"
            )

    def fitting(self, matcher: Any) -> np.ndarray:
        """The bits [W] uint32 of the ids that fit as text where a matcher is."""
        found_W = np.zeros(self.num_library_words, np.uint32)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(found_W.ctypes.data, found_W.nbytes)
        return found_W[: len(self.text_W)] & self.text_W


def _library_tokenizer(tokenizer_json: str, num_ids: int, end_id: int) -> Any:
    import llguidance

    try:
        return llguidance.LLTokenizer(tokenizer_json, n_vocab=num_ids, eos_token=end_id)
    except BaseException as error:
        # A panic of the Rust side is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise NotImplementedError(
                "structured outputs need a byte-level tokenizer or one with byte "
                f"fallback: {error}"
            ) from None
        raise
