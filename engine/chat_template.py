"""Chat messages to prompt text, through the checkpoint's own template. No jax.

Templates come from strangers: jinja2's immutable sandbox runs them, within bounds of
time and size (template_bounds.py).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, parser

from headrace.engine.template_bounds import (
    BoundedEnvironment,
    Budget,
    checked,
    spending,
)

# What a stranger's template can raise at messages that it did not expect.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is nothing.

    Source: transformers' chat templates (AssistantTracker).
    """

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        """Replaces the block by what it holds."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a conversation as the model was trained to see it.

    Args:
      template: jinja2 source of the checkpoint; None where it has none.
      messages: mappings with "role" and "content".
      bos_token, eos_token: what the template calls by these names.
      add_generation_prompt: end with the opening of the assistant's turn.
      **variables: what else the template knows, such as `tools`.

    Raises:
      ValueError: no template, malformed messages, or the template refuses them.
    """
    if template is None:
        raise ValueError("this model has no chat template; use generate")
    _check_messages(messages)
    compiled, budget = _compiled(template), Budget()
    known = {
        "messages": [dict(message) for message in messages],
        "bos_token": bos_token or "",
        "eos_token": eos_token or "",
        "add_generation_prompt": add_generation_prompt,
    }
    parts, length = [], 0
    try:
        with spending(budget):
            for part in compiled.generate(known | variables):
                length += len(part)
                budget.check_len(length)
                parts.append(part)
        return "".join(parts)
    except _TEMPLATE_FAULTS as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list or not messages:
        raise ValueError(f"messages must be a non-empty list, got {messages!r:.80}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {place} must be a mapping with 'role' and 'content', got "
                f"{type(message).__name__}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"message {place} needs a str under {key!r}, got "
                    f"{message.get(key)!r:.80}"
                )


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = checked(_to_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.bounded(template)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template does not parse: {error}") from None


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
