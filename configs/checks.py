"""Range checks with one message each: the name, the range, the value."""

import math
from typing import Any


def check_range(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """A number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:
        top = "" if math.isinf(high) else f" and at most {high}"
        raise ValueError(f"{name} must be at least {low}{top}, got {value!r}")


def check_int(name: str, value: Any, low: int, high: float = math.inf) -> None:
    """A whole number in [low, high]."""
    check_range(name, value, low, high)
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of a few values."""
    # A bool equals 0 or 1 and would pass as one.
    if value not in choices or type(value) not in map(type, choices):
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")


def check_tuple(name: str, value: Any) -> None:
    """A tuple, not a list: configs are hashable."""
    if not isinstance(value, tuple):
        raise ValueError(f"{name} must be a tuple, got {value!r}")
