"""Schemes of quantized weights, as plain data with names.

A name is the type of the values, then what differs from one scale per output:
"int8", "fp8", "int4-g64" (groups of 64 inputs share a scale), "int4-g128-z" (zero
points), "w8a8" and "fp8-w8a8" (activations are quantized per token as well). No jax.
"""

import dataclasses
import re
from typing import Literal

ValueType = Literal["int8", "int4", "float8_e4m3fn"]
ActivationType = Literal["int8", "float8_e4m3fn"]

BITS: dict[ValueType, int] = {"int8": 8, "int4": 4, "float8_e4m3fn": 8}
_SHORT: dict[ValueType, str] = {"int8": "int8", "int4": "int4", "float8_e4m3fn": "fp8"}
_NAME = re.compile(r"(int8|int4|fp8)(?:-g(\d+))?(-z)?")
_WITH_ACTIVATIONS: dict[str, ActivationType] = {
    "w8a8": "int8",
    "fp8-w8a8": "float8_e4m3fn",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """How one weight is kept; value = (stored - zero) * scale.

    Attributes:
      values: type of the stored values.
      group_size: inputs that share a scale; None is all of an output.
      has_zeros: a zero point beside each scale.
      activations: type to which rows are quantized before the product; None leaves
        them as they are.

    Raises:
      ValueError: fields that do not go together.
    """

    values: ValueType
    group_size: int | None = None
    has_zeros: bool = False
    activations: ActivationType | None = None

    def __post_init__(self) -> None:
        if self.values not in BITS:
            raise ValueError(f"values must be one of {list(BITS)}, got {self.values!r}")
        if self.group_size is not None and self.group_size < 2:
            raise ValueError(f"group_size must be at least 2, got {self.group_size}")
        if self.has_zeros and self.values == "float8_e4m3fn":
            raise ValueError("fp8 has no zero points")
        if self.activations is not None and (
            self.activations != self.values or self.group_size or self.has_zeros
        ):
            raise ValueError(
                f"activations {self.activations!r} need weights of the same type with "
                f"one scale per output, got {self}"
            )

    @property
    def name(self) -> str:
        """Short and unambiguous; `parse_scheme` reads it."""
        for name, values in _WITH_ACTIVATIONS.items():
            if self.activations == values:
                return name
        group = f"-g{self.group_size}" if self.group_size else ""
        return _SHORT[self.values] + group + ("-z" if self.has_zeros else "")

    def num_groups(self, inputs: int) -> int:
        """Scales per output.

        Raises:
          ValueError: the group size does not divide the inputs.
        """
        if self.group_size is None:
            return 1
        if inputs % self.group_size:
            raise ValueError(
                f"group size {self.group_size} of scheme {self.name!r} does not divide "
                f"a weight's {inputs} inputs"
            )
        return inputs // self.group_size

    def weight_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight on the device: values, float32 scales, zero points."""
        groups = outputs * self.num_groups(inputs)
        return outputs * inputs * BITS[self.values] // 8 + groups * (4 + self.has_zeros)


def parse_scheme(name: str) -> Scheme:
    """The scheme of a name.

    Raises:
      ValueError: no such scheme; examples are given.
    """
    if (both := _WITH_ACTIVATIONS.get(name)) is not None:
        return Scheme(values=both, activations=both)
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(
            f"quantization must be such as int8, w8a8, fp8, fp8-w8a8, int4-g32, "
            f"int4-g64, int4-g128 or int4-g128-z, got {name!r}"
        )
    short, group, zeros = found.groups()
    values = next(v for v, text in _SHORT.items() if text == short)
    if values == "int4" and group is None:
        raise ValueError(f"int4 needs a group size, such as int4-g64, got {name!r}")
    return Scheme(
        values=values,
        group_size=int(group) if group else None,
        has_zeros=zeros is not None,
    )
