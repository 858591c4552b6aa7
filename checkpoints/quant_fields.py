"""A JSON object of settings, read strictly: every field is asked for or refused.

What the readers of quantized checkpoints share. A field that changes what a weight
means must be known, and so must its value; one that only informs is named as such.
"""

from collections.abc import Iterable, Mapping
from typing import Any


class Fields:
    """The fields of one object.

    Args:
      values: the object.
      where: how messages call it, such as "quantization_config".

    Raises:
      ValueError: it is no object.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{where} must be a JSON object, got {values!r}")
        self.values, self.where = values, where
        self._known: set[str] = set()

    def choice(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """A value among those that are known; null and an absent key mean `default`.

        Raises:
          ValueError: another value, named with its field.
        """
        self._known.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        # 1 is no True.
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise ValueError(
                f"{self.where}: {key} {value!r} is not supported; known: "
                f"{list(allowed)}"
            )
        return value

    def must_be_empty(self, *keys: str) -> None:
        """Fields that are only known without content: null, false, {} or [].

        Raises:
          ValueError: one has content.
        """
        for key in keys:
            self._known.add(key)
            if self.values.get(key) not in (None, False, {}, []):
                raise ValueError(
                    f"{self.where}: {key} {self.values[key]!r} is not supported; "
                    f"known: [None]"
                )

    def group_size(self, key: str = "group_size", default: int = -1) -> int | None:
        """Inputs that share a scale; None, said as -1, is all of an output.

        Raises:
          ValueError: no whole number, or one below 2.
        """
        self._known.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        if value == -1 and not isinstance(value, bool):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise ValueError(
                f"{self.where}: {key} must be -1 or at least 2, got {value!r}"
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of texts; null is an empty one.

        Raises:
          ValueError: something else.
        """
        self._known.add(key)
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ValueError(
                f"{self.where}: {key} must be a list of texts, got {value!r}"
            )
        return tuple(value)

    def take(self, key: str) -> Any:
        """A field that the caller checks, None where it is absent."""
        self._known.add(key)
        return self.values.get(key)

    def finish(self, *informing: str) -> None:
        """Refuses what nobody asked for.

        Args:
          *informing: fields that change nothing.

        Raises:
          ValueError: an unknown field with content.
        """
        known = self._known.union(informing)
        for key, value in self.values.items():
            if key not in known and value is not None:
                raise ValueError(
                    f"{self.where}: the field {key!r} (here {value!r}) is not known; "
                    f"known: {sorted(known)}"
                )


def is_named(module: str, names: Iterable[str]) -> bool:
    """Whether a module is, or lies within, one that is named.

    A name is whole parts of a path: "lm_head", "model.layers.1" or "down_proj", and
    "layers.1" is not "layers.10".
    """
    return any(f".{name.strip('.')}." in f".{module}." for name in names)
