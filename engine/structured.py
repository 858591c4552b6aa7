"""Structured output: which tokens may come next. Host side, no jax.

The engine's GrammarCompiler turns a request's StructuredOutputsParams into a
GrammarState, which fills the mask of a step and advances by the token that was sampled.
The parsing is llguidance's, imported with the first compiler. Which ids end a request
is not known here: each mask is asked for with the request's own.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.engine.grammar_tokens import GrammarTokens
from headrace.engine.structured_params import (
    StructuredOutputsParams,
    grammar_source,
    shown,
)

# Copies of a matcher share a lexer, whose states add up over all of them, to 250,000.
# A hard regex makes 30 a token, JSON far fewer; a new lexer costs 2 to 200 ms.
RENEW_AFTER = 4096
_LIMITS: dict[str, Any] = {"verbose_errors": False}


class GrammarCompiler:
    """Makes GrammarStates for one tokenizer; may be used by several threads.

    Args:
      tokens: of the model.
      max_cached: compiled grammars that are kept; the one used longest ago goes first.
    """

    def __init__(self, tokens: GrammarTokens, *, max_cached: int = 64) -> None:
        self._tokens = tokens
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[StructuredOutputsParams, Grammar]
        self._cache = collections.OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> "GrammarState":
        """The state before the first token. Long for a large schema: hold no lock.

        Raises:
          ValueError: the library cannot take the schema, regex or grammar; it says why.
        """
        with self._lock:
            grammar = self._cache.get(params)
        if grammar is None:
            grammar = Grammar(self._tokens, params)
        with self._lock:
            grammar = self._cache.setdefault(params, grammar)
            self._cache.move_to_end(params)
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return GrammarState(grammar)


class Grammar:
    """One compiled grammar, and the lexer that its states share for a while.

    A state that meets one of the library's limits may meet it for what the others did.
    It then goes on by itself (see GrammarState), the lexer is used no more, and well
    before that it is replaced by a new one, in a thread.

    Attributes:
      tokens: of the model.
      begin_W: the bits of the tokens that fit at the beginning.
    """

    def __init__(self, tokens: GrammarTokens, params: StructuredOutputsParams) -> None:
        self.tokens, self._params = tokens, params
        self._source = grammar_source(params)
        self._lock = threading.Lock()
        self._num_tokens = 0
        self._matcher: Any | None = self.new_matcher()
        self.begin_W = tokens.fitting(self._matcher)
        if not self.begin_W.any() and not self._matcher.is_accepting():
            raise ValueError(
                f"{params.kind} must be one that the tokenizer can write, got "
                f"{shown(getattr(params, params.kind))}"
            )

    def new_matcher(self) -> Any:
        """A matcher at the beginning, with a lexer of its own.

        Raises:
          ValueError: the library cannot take the grammar.
        """
        import llguidance

        matcher = llguidance.LLMatcher(
            self.tokens.library,
            self._source,
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )
        if matcher.is_error():
            kind = self._params.kind
            # Our own line and JSON's options would follow.
            reason = matcher.get_error().split("\n   1 | ")[0]
            raise ValueError(
                f"{kind} must be one that llguidance takes, got "
                f"{shown(getattr(self._params, kind))}: {reason:.500}"
            )
        return matcher

    def matcher(self) -> Any:
        """A matcher at the beginning, with the shared lexer."""
        with self._lock:
            if self._matcher is None:
                self._matcher, self._num_tokens = self.new_matcher(), 0
            return self._matcher.deep_copy()

    def count_token(self) -> None:
        """A state with the shared lexer took a token."""
        with self._lock:
            self._num_tokens += 1
            is_worn = self._num_tokens == RENEW_AFTER
        if is_worn:
            threading.Thread(target=self._renew, daemon=True).start()

    def give_up_lexer(self) -> None:
        """The shared lexer has failed; states that begin from now on get a new one."""
        with self._lock:
            self._matcher = None

    def _renew(self) -> None:
        matcher = self.new_matcher()
        with self._lock:
            self._matcher, self._num_tokens = matcher, 0


class GrammarState:
    """How far one completion has come in its grammar; GrammarCompiler makes them.

    Several states may be used at once, each by one thread at a time.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._tokens = grammar, grammar.tokens
        # Made with the first token: requests that wait hold none.
        self._shared: Any | None = None
        self._own: Any | None = None
        self._token_ids: list[int] = []
        self._fitting_W: np.ndarray | None = grammar.begin_W  # never written to again

    def copy(self) -> "GrammarState":
        """A state at the same place that goes on by itself."""
        twin = GrammarState(self._grammar)
        twin._shared = self._shared and self._shared.deep_copy()
        twin._own = self._own and self._own.deep_copy()
        twin._token_ids, twin._fitting_W = [*self._token_ids], self._fitting_W
        return twin

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is a whole match, so that an end may come."""
        return self._matcher().is_accepting()

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
        """Writes which tokens may come next; none at a dead end.

        The stop ids may come where the text is complete. Without `allow_stop` none
        may, not even as text, unless nothing else fits.

        Args:
          mask_W: int32, one word per 32 ids; bit i % 32 of word i // 32 is id i.
          stop_ids: what ends this request, in [0, vocab_size).
          allow_stop: False before the request's min_tokens.

        Raises:
          ValueError: the grammar needs more than the library's limits allow, or a stop
            id is out of its range.
        """
        fitting_W = self._fitting()
        stops_W = np.zeros_like(fitting_W)
        for stop_id in stop_ids:
            if not 0 <= stop_id < self._tokens.vocab_size:
                top = self._tokens.vocab_size - 1
                raise ValueError(f"stop_ids must be in [0, {top}], got {stop_id}")
            stops_W[stop_id // 32] |= np.uint32(1 << stop_id % 32)
        allowed_W = fitting_W & ~stops_W
        if allow_stop or not allowed_W.any():
            allowed_W = fitting_W | stops_W if self.is_complete else fitting_W
        mask_W[:] = allowed_W.view(np.int32)

    def advance(self, token_id: int) -> None:
        """Takes the token that was sampled; a stop id that is no text changes nothing.

        Raises:
          ValueError: a token that was not allowed, or a limit as in `fill_mask`.
        """
        fitting_W = self._fitting()
        is_known = 0 <= token_id < self._tokens.vocab_size
        if is_known and int(fitting_W[token_id // 32]) >> token_id % 32 & 1:
            self._fitting_W = None
            self._ask(lambda matcher: matcher.consume_token(token_id))
            self._token_ids.append(token_id)
            if self._own is None:
                self._grammar.count_token()
        elif not self.is_complete:
            raise ValueError(
                f"token_id must be one that fits the grammar, got {token_id}"
            )

    def _fitting(self) -> np.ndarray:
        """The bits of the tokens that fit as text."""
        if self._fitting_W is None:
            self._fitting_W = self._ask(self._tokens.fitting)
        return self._fitting_W

    def _matcher(self) -> Any:
        if self._own is not None:
            return self._own
        if self._shared is None:
            self._shared = self._grammar.matcher()
        return self._shared

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        """What a matcher answers: at a limit of the shared lexer, one of our own."""
        matcher = self._matcher()
        answer = ask(matcher)
        error = _limit_error(matcher)
        if error and self._own is None:
            self._grammar.give_up_lexer()
            self._own, self._shared = self._grammar.new_matcher(), None
            self._own.consume_tokens(self._token_ids)
            answer = ask(self._own)
            error = _limit_error(self._own)
        if error:
            raise ValueError(
                "the grammar must stay within llguidance's limits, got "
                + error.split("\n<")[0]
            )
        return answer


def _limit_error(matcher: Any) -> str:
    error = matcher.get_error()
    # The library calls it an error, too, that no token fits.
    return "" if error.startswith("NoExtension") else error
