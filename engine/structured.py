"""Structured output: which tokens may come next. Host side, no jax.

The engine's GrammarCompiler turns a request's StructuredOutputsParams into a
GrammarState, which fills the mask of a step and advances by the token that was sampled.
The parsing is llguidance's, imported with the first compiler. Which ids end a request
is not known here: each mask is asked for with the request's own.
"""

import collections
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from headrace.engine.structured_params import StructuredOutputsParams, grammar_source

# Ends texts inside the library alone, so that none of the model's tokens does.
_END_TOKEN = "<|headrace-end-of-text|>"

# Read by both tokenizer libraries when a compiler is built; they have to agree.
_PROBE = '{"a b": [1, 2]}\n\t\u00e9\u65e5'


class _Vocabulary:
    """The library's tokenizer, and which ids are text.

    Attributes:
      text_W: the bits of the ids that can be text: of the tokenizer, not special.
      num_library_words: words of the library's masks, which have its end token too.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_id: int | None
    ) -> None:
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
        if eos_token_id is not None and eos_token_id < vocab_size:
            is_text[eos_token_id] = False
        self.text_W = np.packbits(is_text, bitorder="little").view("<u4")
        ids = fast.encode(_PROBE, add_special_tokens=False).ids
        ids = [i for i in ids if i < vocab_size and is_text[i]]
        read = self.library.decode_str(ids)
        if read.lstrip() != fast.decode(ids).lstrip():
            raise NotImplementedError(
                f"structured outputs cannot read this tokenizer: the text of {ids} is "
                f"{fast.decode(ids)!r}, llguidance reads {read!r}"
            )


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


class GrammarCompiler:
    """Makes GrammarStates for one tokenizer; may be used by several threads.

    Args:
      tokenizer_json: as in TokenizerSpec.
      vocab_size: rows of the model's logits; ids past the tokenizer's are never text.
      eos_token_id: the model's end token, never text even if it is not marked special.
      max_cached: compiled grammars that are kept; the one used longest ago goes first.

    Raises:
      ValueError: `tokenizer_json` holds no tokenizer.
      NotImplementedError: a tokenizer whose bytes llguidance cannot tell.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_id: int | None = None,
        max_cached: int = 64,
    ) -> None:
        self._vocabulary = _Vocabulary(tokenizer_json, vocab_size, eos_token_id)
        self._max_cached = max_cached
        self._lock = threading.Lock()
        # NOTE: a matcher and its copies share a lexer, which fails for all of them
        # once it has failed; such a one is compiled anew.
        self._cache: collections.OrderedDict[StructuredOutputsParams, GrammarState]
        self._cache = collections.OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> "GrammarState":
        """The state before the first token.

        Raises:
          ValueError: the library cannot take the schema, regex or grammar; it says why.
        """
        with self._lock:
            kept = self._cache.get(params)
        if kept is None or kept.has_failed:
            # Without the lock, since a large schema takes 0.1 s.
            kept = GrammarState(self._new_matcher(params), self._vocabulary, [])
            if not kept.can_go_on and not kept.is_complete:
                raise ValueError(
                    f"{params.kind} must be one that the tokenizer can write, got "
                    f"{getattr(params, params.kind)!r}"
                )
        with self._lock:
            self._cache[params] = kept
            self._cache.move_to_end(params)
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            return kept.copy()

    def _new_matcher(self, params: StructuredOutputsParams) -> Any:
        import llguidance

        matcher = llguidance.LLMatcher(
            self._vocabulary.library,
            grammar_source(params),
            log_level=0,
            limits=llguidance.LLParserLimits(verbose_errors=False),
        )
        if matcher.is_error():
            raise ValueError(
                f"{params.kind} must be one that llguidance takes, got "
                f"{getattr(params, params.kind)!r}: "
                # Our own line and JSON's options would follow.
                + matcher.get_error().split("\n   1 | ")[0]
            )
        return matcher


class GrammarState:
    """How far one completion has come in its grammar; GrammarCompiler makes them.

    Several states may be used at once, each by one thread at a time.
    """

    def __init__(
        self, matcher: Any, vocabulary: _Vocabulary, errors: list[str]
    ) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._errors = errors  # shared by all copies, as the lexer is
        self._fitting_W: np.ndarray | None = None  # never written to again

    def copy(self) -> "GrammarState":
        """A state at the same place that goes on by itself."""
        twin = GrammarState(self._matcher.deep_copy(), self._vocabulary, self._errors)
        twin._fitting_W = self._fitting_W
        return twin

    @property
    def has_failed(self) -> bool:
        """Whether a limit of the library was met, by this state or a copy."""
        return bool(self._errors)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a whole match, so that an end may come."""
        return self._matcher.is_accepting()

    @property
    def can_go_on(self) -> bool:
        """Whether some token of text can come next.

        Raises:
          ValueError: as in `fill_mask`.
        """
        return bool(self._fitting().any())

    def fill_mask(
        self,
        mask_W: np.ndarray,
        *,
        stop_ids: Sequence[int] = (),
        allow_stop: bool = True,
    ) -> None:
        """Writes which tokens may come next.

        The stop ids may come where the text is complete and `allow_stop` holds, and
        where no text can. A stop id that is text besides may come where text may. With
        no stop ids the mask is 0 where `can_go_on` is False.

        Args:
          mask_W: int32, one word per 32 ids; bit i % 32 of word i // 32 is id i.
          stop_ids: what ends this request, in [0, vocab_size).
          allow_stop: False before the request's min_tokens.

        Raises:
          ValueError: the grammar needs more than the library's limits allow, or a stop
            id is out of its range.
        """
        fitting_W = self._fitting()
        mask_W[:] = fitting_W.view(np.int32)
        if (allow_stop and self.is_complete) or not fitting_W.any():
            words = mask_W.view(np.uint32)
            for stop_id in stop_ids:
                if not 0 <= stop_id < self._vocabulary.vocab_size:
                    top = self._vocabulary.vocab_size - 1
                    raise ValueError(f"stop_ids must be in [0, {top}], got {stop_id}")
                words[stop_id // 32] |= np.uint32(1 << stop_id % 32)

    def advance(self, token_id: int) -> None:
        """Takes the token that was sampled; a stop id that is no text changes nothing.

        Raises:
          ValueError: a token that was not allowed, or a limit as in `fill_mask`.
        """
        fitting_W = self._fitting()
        is_known = 0 <= token_id < self._vocabulary.vocab_size
        if is_known and int(fitting_W[token_id // 32]) >> token_id % 32 & 1:
            self._fitting_W = None
            self._matcher.consume_token(token_id)
            self._check_limits()
        elif not (self.is_complete or not fitting_W.any()):
            raise ValueError(
                f"token_id must be one that fits the grammar, got {token_id}"
            )

    def _fitting(self) -> np.ndarray:
        """The bits of the tokens that fit as text."""
        if self._fitting_W is None:
            found_W = np.zeros(self._vocabulary.num_library_words, np.uint32)
            if not self._matcher.is_stopped():
                self._matcher.unsafe_compute_mask_ptr(
                    found_W.ctypes.data, found_W.nbytes
                )
            self._check_limits()
            text_W = self._vocabulary.text_W
            self._fitting_W = found_W[: len(text_W)] & text_W
        return self._fitting_W

    def _check_limits(self) -> None:
        error = self._matcher.get_error()
        # The library calls it an error, too, that no token fits.
        if error and not error.startswith("NoExtension"):
            self._errors.append(error)
            raise ValueError(
                "the grammar must stay within llguidance's limits, got "
                + error.split("\n<")[0]
            )
