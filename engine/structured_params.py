"""What structured output a request asks for, checked. Host side, no jax.

Whether the schema, regex or grammar itself is sound is found when `structured.py`
compiles what `grammar_source` makes of them.
"""

import dataclasses
import json as json_lib
import re
from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = ("json", "regex", "choice", "grammar", "json_object")

# Every token that fits is allowed, not only the tokenizer's own cut of a text that is
# certain. The last line of this kind wins.
_OPTIONS = '\n%llguidance {"no_forcing": true, "allow_invalid_utf8": false}\n'

# What is no rule in a Lark grammar, and attributes of rules that would be ignored.
_LARK_LITERAL = re.compile(
    r'//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/', re.DOTALL
)
_LARK_ATTRIBUTE = re.compile(r"\b(temperature|stop)\s*=")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text of a completion has to be; exactly one of the first five.

    Names are vLLM's. Equal ones are equal and hash alike.

    Attributes:
      json: a JSON schema, as text or as a mapping (kept as text). Properties come in
        the order of the schema.
      regex: matches the whole text; Rust's syntax, without look-around.
      choice: the text is one of these.
      grammar: Lark syntax as llguidance reads it; the text comes from `start`.
      json_object: any JSON object.
      disable_any_whitespace: JSON on one line without spaces.
      whitespace_pattern: a regex of the white space between JSON's parts, at most one
        match per place; None allows any amount. It must match white space only.

    Raises:
      ValueError: none or several of the five, or a value of the wrong kind.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name} must be True or False, got {getattr(self, name)!r}"
                )
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {_KINDS} must be given, got {given}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise ValueError(f"{name} needs json or json_object, got {given[0]}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                f"whitespace_pattern must be None with disable_any_whitespace, "
                f"got {shown(self.whitespace_pattern)}"
            )

    @property
    def num_chars(self) -> int:
        """Characters of what is asked for."""
        values = (self.json, self.regex, self.grammar, *(self.choice or ()))
        return sum(len(value) for value in values if value is not None)

    @property
    def kind(self) -> str:
        """Name of the one field that is given."""
        return next(n for n in _KINDS if getattr(self, n) not in (None, False))


def shown(value: object) -> str:
    """A user's value in a message: its beginning, since it may be long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({len(text)} characters)"


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a str that is not empty, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode: {error}") from None


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"choice must be a list of at least 1 str, got {shown(value)}")
    for text in value:
        _check_text("choice", text)
    return tuple(value)


def _schema_text(value: object) -> str:
    """A schema as JSON text."""
    try:
        if isinstance(value, Mapping):
            value = json_lib.dumps(dict(value), allow_nan=False)
        schema = json_lib.loads(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"json must be a JSON schema, got {shown(value)}: {error}"
        ) from None
    if not isinstance(schema, dict):
        raise ValueError(f"json must be a schema that is an object, got {shown(value)}")
    if "x-guidance" in schema:
        raise ValueError(
            "json must have no 'x-guidance': whitespace_pattern and "
            f"disable_any_whitespace say the same, got {shown(schema['x-guidance'])}"
        )
    return str(value)


def grammar_source(params: StructuredOutputsParams) -> str:
    """What is asked for as llguidance takes it.

    Raises:
      ValueError: a Lark grammar that names tokens or has attributes we would ignore.
    """
    if params.grammar is not None:
        _check_lark(params.grammar)
    return _source(_lark(params) + _OPTIONS)


def _source(lark: str) -> str:
    return json_lib.dumps({"grammars": [{"lark_grammar": lark}]})


def _lark(params: StructuredOutputsParams) -> str:
    """What is asked for as a Lark grammar."""
    import llguidance

    if params.grammar is not None:
        return params.grammar
    if params.regex is not None:
        return f"start: /{llguidance.regex_to_lark(params.regex, '')}/"
    if params.choice is not None:
        return f"start: /{'|'.join(map(_as_regex, params.choice))}/"
    assert params.json is None or isinstance(params.json, str)
    schema = json_lib.loads(params.json) if params.json else {"type": "object"}
    schema["x-guidance"] = {
        "lenient": False,  # a keyword that is not supported is an error
        "coerce_one_of": False,
        "whitespace_flexible": not params.disable_any_whitespace,
        "whitespace_pattern": params.whitespace_pattern,
    }
    return f"start: %json {json_lib.dumps(schema)}"


def _as_regex(text: str) -> str:
    """A regex of this very text."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"
        for char in text
    )


def _check_lark(grammar: str) -> None:
    """Refuses what the library takes and this engine cannot do.

    Raises:
      ValueError: an attribute that would be ignored, or tokens named by id.
    """
    import llguidance

    if found := _LARK_ATTRIBUTE.search(_LARK_LITERAL.sub('""', grammar)):
        raise ValueError(
            f"grammar must have no attribute {found[1]!r}, got {shown(grammar)}"
        )
    check = llguidance.LLMatcher.validate_grammar_with_warnings
    _, messages = check(_source(grammar))
    # Without a tokenizer the library warns of each place that names tokens.
    if any(message.startswith("no tokenizer") for message in messages):
        raise ValueError(
            f"grammar must name no tokens such as <s>, got {shown(grammar)}"
        )
