"""Stands in for two packages that a machine lent for minutes may lack.

jaxtyping only annotates, and of ml_collections the configs use one class. Neither is
replaced where it is installed; only the self-check calls this.
"""

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


def install() -> list[str]:
    """Puts a stand-in for each that is missing into `sys.modules`; their names."""
    makers = {"jaxtyping": _jaxtyping, "ml_collections": _ml_collections}
    missing = [name for name in makers if not _is_there(name)]
    for name in missing:
        sys.modules[name] = makers[name]()
    return missing


def _is_there(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


class ConfigDict:
    """As much of `ml_collections.ConfigDict` as the files in configs/ use.

    Attributes are keys; a dict that is set becomes a ConfigDict.
    """

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        for name, value in (values or {}).items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        is_dict = isinstance(value, dict)
        self.__dict__[name] = ConfigDict(value) if is_dict else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key, or the default."""
        return self.__dict__.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, all the way down."""
        return {
            name: value.to_dict() if isinstance(value, ConfigDict) else value
            for name, value in self.__dict__.items()
        }

    def items(self) -> Any:
        """Keys with their values."""
        return self.__dict__.items()


def _ml_collections() -> types.ModuleType:
    module = types.ModuleType("ml_collections")
    module.ConfigDict = ConfigDict  # type: ignore[attr-defined]
    return module


class _Annotation:
    """`Float[Array, "B T"]` is no type anyone looks at."""

    def __class_getitem__(cls, item: Any) -> Any:
        return Any


def _jaxtyping() -> types.ModuleType:
    import jax

    module = types.ModuleType("jaxtyping")
    module.Array = jax.Array  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: _annotation(name)  # type: ignore[method-assign]
    return module


def _annotation(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Annotation
