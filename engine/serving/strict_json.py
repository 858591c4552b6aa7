"""JSON from strangers: bounded, UTF-8, finite numbers, one object. No jax.

The standard parser takes more than JSON (NaN, UTF-16) and recurses as deep as it is
told to; what it makes of a line must be the same on every machine.
"""

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Brackets within brackets; JSON schemas of real use stay below 20."""

# Brackets within strings do not nest. A string that never ends hides the rest, which
# the parser refuses afterwards.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def parse_object(text: bytes) -> dict[str, Any]:
    """One JSON object.

    Args:
      text: UTF-8; its length is the caller's to bound. Of a key that comes twice the
        last value counts, as everywhere in Python.

    Raises:
      ValueError: no UTF-8, no JSON, no object, brackets deeper than MAX_DEPTH, or a
        number that is not finite.
    """
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"no UTF-8: byte {text[error.start]:#04x} at place {error.start}"
        ) from None
    _check_depth(decoded)
    try:
        value = json.loads(decoded, parse_constant=_refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at place {error.pos}") from None
    except RecursionError:
        raise ValueError("no JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is wanted, got {type(value).__name__}")
    return value


def _check_depth(text: str) -> None:
    # Most texts have so few brackets that none can be too deep.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for bracket in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"brackets must nest at most {MAX_DEPTH} deep")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {name}")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, got {text:.40}")
    return number
