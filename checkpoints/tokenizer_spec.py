"""A tokenizer as a checkpoint hands it over: plain text, no jax, no engine."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """Everything that the engine needs to build a tokenizer.

    Attributes:
      tokenizer_json: text for `tokenizers.Tokenizer.from_str`.
      chat_template: jinja2 source, None where the model has none.
      bos_token, eos_token: their text, None where the model has none.
      add_bos: whether a prompt starts with the first token.
    """

    tokenizer_json: str
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool = False
