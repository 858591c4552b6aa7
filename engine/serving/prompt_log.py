"""Prompts in the log, for those who ask for them; nothing else writes them anywhere."""

import logging
from collections.abc import Sequence
from typing import Any

from headrace.engine.serving.calls import Call
from headrace.engine.serving.server_options import PromptLogging

# Not below headrace.engine, whose lines are off without --verbosity=1.
logger = logging.getLogger("headrace.prompts")

_MAX_CHARS = 10_000


class PromptLog:
    """Writes a line per prompt.

    Args:
      mode: "redacted" keeps the shape of a text: letters as x, digits as 0.
    """

    def __init__(self, mode: PromptLogging) -> None:
        self._mode = mode
        if mode != "none":
            logger.setLevel(logging.INFO)

    def write(self, tenant: str, call: Call) -> None:
        """Logs what a call asks to go on from."""
        if self._mode == "none":
            return
        if call.messages is not None:
            shown = self._messages(call.messages)
        else:
            shown = self._prompt(call.prompt)
        logger.info("prompt of %s, %s: %s", tenant, call.request_id or "-", shown)

    def _messages(self, messages: Sequence[Any]) -> str:
        # A front may have let through what the service has yet to refuse.
        texts = [m.get("content") for m in messages if isinstance(m, dict)]
        return " ".join(self._text(text) for text in texts if isinstance(text, str))

    def _prompt(self, prompt: str | Sequence[int] | None) -> str:
        if isinstance(prompt, str):
            return self._text(prompt)
        ids = prompt or ()
        return f"{len(ids)} token ids" + (
            f" {list(ids[:_MAX_CHARS])}" if self._mode == "full" else ""
        )

    def _text(self, text: str) -> str:
        shown = text[:_MAX_CHARS]
        if self._mode == "redacted":
            shown = "".join(map(_masked, shown))
        more = f" ({len(text)} characters)" if len(text) > _MAX_CHARS else ""
        return repr(shown) + more  # one line, whatever is in it


def _masked(char: str) -> str:
    if char.isspace() or char.isascii() and not char.isalnum():
        return char
    return "0" if char.isnumeric() else "x"
