"""Dataclasses from mappings, such as parsed JSON. No jax."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Self


class FromMapping:
    """Adds `from_mapping` to a dataclass: unknown keys are an error that names them."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Builds the dataclass from a mapping, such as a ConfigDict or parsed JSON.

        Args:
          values: field name to value; lists become tuples.

        Raises:
          ValueError: a key is no field (the nearest field is named), or a value is
            out of its range.
        """
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f", did you mean {near[0]!r}?" if near else ";"
                raise ValueError(
                    f"{cls.__name__} has no key {key!r}{hint} known keys: {names}"
                )
        missing = [
            field.name
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if field.name not in values
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{cls.__name__} lacks the keys {missing}")
        return cls(**{key: _plain(value) for key, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return value
