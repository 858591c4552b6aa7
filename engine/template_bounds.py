"""A jinja2 sandbox in which a template cannot run or grow without end. No jax.

jinja2's sandbox keeps a stranger's template from Python, not from looping for hours or
filling memory. Here loops, calls and whatever makes long strings ask a budget, which
each rendering has for itself. It bounds what templates do in steps and lengths; a
template made to be slow within one step, such as by joining a list of the same long
string, can still take some seconds.
"""

import contextlib
import contextvars
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
from jinja2 import nodes, visitor
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 200_000
MAX_CHARS = 16_000_000
MAX_TIME_S = 5.0
# Of a number that a template passes to a function or filter: widths, counts.
_MAX_NUMBER = 1_000_000
_MAX_BITS = 4096  # of a product of integers
# A width of over a million, or one from the arguments, in a format string.
_WIDE = re.compile(r"\d{7}|%[^%a-zA-Z]*\*|\{[^{}]*\{")


class Budget:
    """What one rendering may still do.

    Args:
      steps: turns of loops, and calls.
      chars: of the longest string.
      time_s: seconds.
    """

    def __init__(
        self,
        steps: int = MAX_STEPS,
        chars: int = MAX_CHARS,
        time_s: float = MAX_TIME_S,
    ) -> None:
        self._steps, self._chars = steps, chars
        self._end_s, self._time_s = time.monotonic() + time_s, time_s

    def step(self, count: int = 1) -> None:
        """So many more turns or calls.

        Raises:
          jinja2.TemplateError: none is left.
        """
        self._steps -= count
        if self._steps < 0:
            raise jinja2.TemplateError("it takes too many steps")
        if time.monotonic() > self._end_s:
            raise jinja2.TemplateError(f"it takes longer than {self._time_s:g} s")

    def check_len(self, length: int) -> None:
        """Raises jinja2.TemplateError where a string or list gets too long."""
        if length > self._chars:
            raise jinja2.TemplateError(
                f"it makes a text of over {self._chars} characters"
            )


_BUDGET: contextvars.ContextVar[Budget] = contextvars.ContextVar("template budget")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with a `Budget`; `spending` renders within one.

    Takes the arguments of jinja2.Environment.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: checked(f) for name, f in self.filters.items()}
        self.filters["format"] = checked(_format)
        self.globals |= {"__turns": _turns, "__concat": _concat}

    def bounded(self, source: str) -> jinja2.Template:
        """A template of `source`.

        Raises:
          jinja2.TemplateError: it does not parse.
        """
        tree = _Bounding().visit(self.parse(source))
        return self.from_string(tree)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """A call in a template."""
        _check_numbers(args, kwargs)
        if getattr(obj, "__name__", None) in ("format", "format_map"):
            # The sandbox has put a function of its own around the string's.
            bound = getattr(obj, "__wrapped__", obj)
            _check_format(getattr(bound, "__self__", None))
        _BUDGET.get().step()
        return _checked_len(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation whose result can be much larger than what goes in."""
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and _is_sized(left) and _is_sized(right):
            _BUDGET.get().check_len(len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and not (abs(left) <= _MAX_NUMBER and abs(right) <= 64):
            raise jinja2.TemplateError("** makes too large a number")
        return super().call_binop(context, operator, left, right)


@contextlib.contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Templates that render meanwhile, in this thread or task, take from `budget`."""
    token = _BUDGET.set(budget)
    try:
        yield
    finally:
        _BUDGET.reset(token)


class _Bounding(visitor.NodeTransformer):
    """Has loops and concatenations ask the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Each turn is a step."""
        self.generic_visit(node)
        node.iter = _call("__turns", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        """Checked before the string is made."""
        self.generic_visit(node)
        return _call("__concat", node.nodes, node.lineno)


def _call(name: str, args: Sequence[nodes.Node], line: int) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=line)
    return nodes.Call(function, list(args), [], None, None, lineno=line)


def _turns(values: Iterable[Any]) -> Iterable[Any]:
    if not _is_sized(values):
        return list(_counted(values))  # a loop asks lists for their length
    _BUDGET.get().step(len(values))  # type: ignore[arg-type]
    return values


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _BUDGET.get().step()
        yield value


def _concat(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _BUDGET.get().check_len(sum(map(len, texts)))
    return "".join(texts)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter within the budget."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args, kwargs)
        _BUDGET.get().step()
        return _checked_len(function(*args, **kwargs))

    return bounded


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    """jinja2's filter of that name."""
    text = str(value)
    _check_format(text)
    return text % (kwargs or args)


def _is_sized(value: Any) -> bool:
    return hasattr(value, "__len__")


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise jinja2.TemplateError(
                f"a number in a call must be at most {_MAX_NUMBER}"
            )


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise jinja2.TemplateError(
            "a format must have no width from its arguments, and no long number"
        )


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if _is_sized(one) and isinstance(other, int):
            _BUDGET.get().check_len(len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise jinja2.TemplateError("* makes too large a number")


def _checked_len(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple):
        _BUDGET.get().check_len(len(value))
    return value
