"""What a request says about text, brought to token ids before it starts. No jax.

The engine below knows ids alone: bad words become token sequences, and structured
outputs a grammar over ids.
"""

import dataclasses
import threading

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine.grammar_tokens import GrammarTokens
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured import GrammarCompiler, GrammarState
from headrace.engine.structured_params import StructuredOutputsParams
from headrace.engine.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRules:
    """What SamplingParams say about text, over token ids.

    Attributes:
      bad_ids: token sequences that spell the bad words, as they begin a text or follow
        a space.
      grammar: of the whole output, at its beginning.
    """

    bad_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarState | None = None


class TextRules:
    """Resolves rules of text for one model; may be used by several threads.

    Args:
      tokenizer: None where the model has none; rules of text are then refused.
      model_config: gives vocabulary and stop ids.
      engine_config: gives the bound on grammars.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model_config: ModelConfig,
        engine_config: EngineConfig,
    ) -> None:
        self._tokenizer, self._model_config = tokenizer, model_config
        self._max_grammar_len = engine_config.max_grammar_len
        self._lock = threading.Lock()
        # Or why there is none.
        self._compiler: GrammarCompiler | str | None = None

    def resolve(self, params: SamplingParams) -> TokenRules:
        """Brings a request's rules to ids. Long for a large schema: hold no lock.

        Raises:
          ValueError: the tokenizer cannot do what is asked, or the grammar cannot be
            read, or not with this tokenizer.
        """
        self._check(params)
        return TokenRules(bad_ids=self._bad_ids(params), grammar=self._grammar(params))

    def _check(self, params: SamplingParams) -> None:
        """Whether the tokenizer can do what is asked.

        Raises:
          ValueError: there is none, or it would put spaces where none are wanted.
        """
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(f"{name} needs a tokenizer, which this model has not")
        tokenizer = self._tokenizer
        if params.spaces_between_special_tokens or tokenizer is None:
            return
        eos = tokenizer.eos_token or ""
        ids = tokenizer.encode(eos, add_bos=False) * 2
        if tokenizer.decode(ids, skip_special_tokens=False) != eos * 2:
            raise ValueError(
                "spaces_between_special_tokens must be True with this tokenizer, which "
                "puts them between all tokens, got False"
            )

    def _bad_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        found = []
        for word in params.bad_words or ():
            assert self._tokenizer is not None
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                found.append(tuple(self._tokenizer.encode(text, add_bos=False)))
        return tuple(found)

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputsParams)  # from a mapping, too
        if asked.num_chars > self._max_grammar_len:
            raise ValueError(
                f"structured_outputs must have at most {self._max_grammar_len:,} "
                f"characters (max_grammar_len), got {asked.num_chars:,}"
            )
        with self._lock:
            if self._compiler is None:
                self._compiler = self._new_compiler()
        if isinstance(self._compiler, str):
            # To the user one request that cannot run, like any other.
            raise ValueError(self._compiler)
        return self._compiler.compile(asked)

    def _new_compiler(self) -> GrammarCompiler | str:
        assert self._tokenizer is not None  # checked
        config = self._model_config
        try:
            tokens = GrammarTokens(
                self._tokenizer.to_json(), config.vocab_size, config.stop_ids
            )
        except NotImplementedError as error:
            return str(error)
        return GrammarCompiler(tokens)
