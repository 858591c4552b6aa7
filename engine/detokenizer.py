"""Text as it streams: each token's text once, never half a character. No jax.

A token's text can depend on the tokens before it, and a character can need several
tokens. So a short window is decoded with and without the new tokens, and the
difference is emitted once it does not end in an unfinished character.
"""

from collections.abc import Sequence

from headrace.engine.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of one completion; the deltas joined are the decoded whole.

    Worked example: "héllo" as tokens [h, \\xc3, \\xa9, llo] emits "h", "", "é", "llo".

        [0, context)        out, and forgotten
        [context, emitted)  out, kept because what follows may depend on it
        [emitted, end)      not out yet

    Each token is decoded a bounded number of times: when nothing comes out for long
    (garbage bytes, skipped tokens), the tries become rarer as the window grows.

    Args:
      tokenizer: decodes ids.
      skip_special_tokens: leave special tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._window: list[int] = []  # the ids of [context, end)
        self._num_context = 0  # emitted - context
        self._is_byte_run = False
        self._next_try = 0

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain."""
        self._window += ids
        self._is_byte_run = self._ends_in_byte_run(ids)
        if self._is_byte_run or len(self._window) < self._next_try:
            return ""
        return self._advance(is_final=False)

    def flush(self) -> str:
        """Returns what is left at the end, unfinished characters as U+FFFD."""
        return self._advance(is_final=True)

    def _ends_in_byte_run(self, ids: Sequence[int]) -> bool:
        """Whether the last token that shows is a byte of a byte-fallback tokenizer.

        Such a decoder turns a whole run of bytes to U+FFFD if any part is invalid, so
        nothing of a run is certain before it ends.
        """
        byte_ids = self._tokenizer.byte_token_ids
        if not byte_ids:
            return False
        for token_id in reversed(ids):
            if token_id in byte_ids:
                return True
            if self._decode([token_id]):
                return False
        return self._is_byte_run

    def _advance(self, *, is_final: bool) -> str:
        before = self._decode(self._window[: self._num_context])
        now = self._decode(self._window)
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not is_final):
            num_new = len(self._window) - self._num_context
            self._next_try = self._num_context + num_new * 9 // 8 + 1
            return ""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._next_try = 0
        return now[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
