"""What a request says about text, brought to token ids before it starts. No jax.

The engine below knows ids alone: bad words become token sequences, and structured
outputs a grammar over ids.
"""

from headrace.configs.schema import ModelConfig
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured import GrammarCompiler, GrammarState
from headrace.engine.structured_params import StructuredOutputsParams
from headrace.engine.tokenizer import Tokenizer


class TextRules:
    """Resolves rules of text for one model.

    Args:
      tokenizer: None where the model has none; rules of text are then refused.
      model_config: gives the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer | None, model_config: ModelConfig) -> None:
        self._tokenizer, self._model_config = tokenizer, model_config
        self._compiler: GrammarCompiler | None = None

    def check(self, params: SamplingParams) -> None:
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

    def bad_ids(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token sequences that spell the bad words, as they begin a text or follow a
        space. `check` was called.
        """
        found = []
        for word in params.bad_words or ():
            assert self._tokenizer is not None
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                found.append(tuple(self._tokenizer.encode(text, add_bos=False)))
        return found

    def grammar(self, params: SamplingParams) -> GrammarState | None:
        """The grammar of the whole output, at its beginning. `check` was called.

        Raises:
          ValueError: it cannot be read, or not with this tokenizer.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputsParams)  # from a mapping, too
        assert self._tokenizer is not None  # checked
        if self._compiler is None:
            try:
                self._compiler = GrammarCompiler(
                    self._tokenizer.to_json(), vocab_size=self._model_config.vocab_size
                )
            except NotImplementedError as error:
                # To the user one request that cannot run, like any other.
                raise ValueError(str(error)) from error
        return self._compiler.compile(asked)
