"""What a linear layer is made of in a quantized checkpoint, and how it is read.

Each published format gives LinearFormats; here is what they share: the tensors of one
layer with their shapes checked, and whole numbers out of 32-bit words.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from headrace.checkpoints.int4_bytes import OFFSET_8
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

FLOATS = ("float16", "bfloat16", "float32")
# Outputs by inputs that are unpacked at a time, so that little is in memory twice.
_BLOCK = 2**20
# Inputs under one scale where int4 has one for a whole output: schemes of int4 have
# groups, and groups that share a scale are the same weight.
_INT4_GROUP = 128


@dataclasses.dataclass(frozen=True)
class LayerTensors:
    """The stored tensors of one linear layer.

    Attributes:
      layer: its name, such as "model.layers.0.mlp.up_proj".
      shape: of its weight, (out, in).
      suffixes: of its tensors, such as "qweight".
      stored: reads a tensor by its whole name, in the type it is stored in.
    """

    layer: str
    shape: tuple[int, int]
    suffixes: Collection[str]
    stored: Callable[[str], np.ndarray]

    def get(
        self, suffix: str, shapes: list[tuple[int, ...]], *dtypes: str
    ) -> np.ndarray:
        """One tensor.

        Raises:
          ValueError: another shape than one of `shapes`, or another type; named.
        """
        name = f"{self.layer}.{suffix}"
        array = self.stored(name)
        if array.shape not in shapes:
            wanted = " or ".join(map(str, shapes))
            raise ValueError(
                f"tensor {name} has shape {array.shape}; a weight {self.shape} that is "
                f"quantized so needs {wanted}"
            )
        if array.dtype.name not in dtypes:
            raise ValueError(
                f"tensor {name} is stored as {array.dtype.name}; known: {list(dtypes)}"
            )
        return array

    def scales(self, suffix: str, shapes: list[tuple[int, ...]]) -> np.ndarray:
        """A tensor of scales, in float32.

        Raises:
          ValueError: as `get`, or one is not finite.
        """
        scales = self.get(suffix, shapes, *FLOATS).astype(np.float32)
        if not np.isfinite(scales).all():
            raise ValueError(f"tensor {self.layer}.{suffix} is not finite")
        return scales

    def no_zeros(self, suffix: str) -> None:
        """Zero points that a symmetric scheme may have stored, all of them 0.

        Raises:
          ValueError: they are not.
        """
        if suffix in self.suffixes and self.stored(f"{self.layer}.{suffix}").any():
            raise ValueError(
                f"tensor {self.layer}.{suffix} has zero points, and its scheme in "
                f"quantization_config is symmetric"
            )


class LinearFormat(Protocol):
    """How the layers of one scheme are stored.

    Attributes:
      label: for messages, such as "awq".
      required, optional: suffixes of a layer's tensors.
    """

    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def required(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def optional(self) -> tuple[str, ...]: ...  # noqa: D102

    def read(self, tensors: LayerTensors) -> QuantizedTensor:
        """The weight [O, I], of host arrays; int4 as bytes (`int4_bytes`).

        Raises:
          ValueError: a tensor of another shape or type, or values that have no
            counterpart here.
        """
        ...


FormatOf = Callable[[str], LinearFormat | None]
"""Name of a layer -> how it is stored, None where it is not quantized."""


def unsigned_fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The fields of int32 words along the last axis, lowest bits first, uint8."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    pairs = np.stack([octets & 15, octets >> np.uint8(4)], axis=-1)
    return pairs.reshape(*octets.shape[:-1], -1)


def signed_values(
    words_OW: np.ndarray, bits: int, order: np.ndarray | None = None
) -> np.ndarray:
    """Unsigned fields of words, less half their range: values as they are kept here.

    Args:
      words_OW: int32, the fields of an output's inputs one after another, lowest bits
        first; an array of our own, which is changed.
      bits: 4 or 8.
      order: source input of each; None leaves them.

    Returns:
      int8 [O, I], or int4 as bytes [O, I / 2].
    """
    octets = words_OW.view(np.uint8)
    octets ^= OFFSET_8 if bits == 4 else np.uint8(0x80)
    if order is not None:
        for begin, end in row_blocks(len(octets), order.size):
            fields = unsigned_fields(octets[begin:end], bits)[:, order]
            if bits == 4:
                fields = fields[:, 0::2] | fields[:, 1::2] << np.uint8(4)
            octets[begin:end] = fields
    return octets if bits == 4 else octets.view(np.int8)


def row_blocks(outputs: int, inputs: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Ranges [begin, end) of outputs that are few enough to be unpacked at a time."""
    step = max(1, _BLOCK // inputs // multiple) * multiple
    return [(begin, min(begin + step, outputs)) for begin in range(0, outputs, step)]


def group_order(
    tensors: LayerTensors, suffix: str, group_size: int | None
) -> np.ndarray | None:
    """The order in which a layer's inputs lie group after group (act-order).

    Args:
      tensors: of the layer; `suffix` holds the group of each input.
      suffix: of the tensor.
      group_size: None is one group.

    Returns:
      int32 [I], None where they do already.

    Raises:
      ValueError: the groups are not of that size.
    """
    inputs = tensors.shape[1]
    group_I = tensors.get(suffix, [(inputs,)], "int32", "int64")
    size = group_size or inputs
    order = np.argsort(group_I, kind="stable").astype(np.int32)
    if not np.array_equal(group_I[order], np.arange(inputs) // size):
        raise ValueError(
            f"tensor {tensors.layer}.{suffix} does not put {size} inputs into each "
            f"group"
        )
    return None if np.array_equal(order, np.arange(inputs)) else order


def integer_weight(
    values: np.ndarray,
    scales_OS: np.ndarray,
    zeros_OS: np.ndarray | None,
    *,
    scheme: Scheme,
    order: np.ndarray | None = None,
) -> QuantizedTensor:
    """A weight of whole numbers.

    Args:
      values: see `signed_values`.
      scales_OS: float32.
      zeros_OS: int8, or None.
      scheme: of int8, or of int4, which may lack its group size.
      order: see QuantizedTensor.
    """
    if scheme.values == "int4" and scheme.group_size is None:
        inputs = 2 * values.shape[-1]
        size = math.gcd(inputs, _INT4_GROUP)
        scheme = dataclasses.replace(scheme, group_size=size)
        scales_OS = np.repeat(scales_OS, inputs // size, axis=-1)
        if zeros_OS is not None:
            zeros_OS = np.repeat(zeros_OS, inputs // size, axis=-1)
    return QuantizedTensor(
        values=values,
        scales=np.ascontiguousarray(scales_OS),
        zeros=None if zeros_OS is None else np.ascontiguousarray(zeros_OS),
        order=order,
        scheme=scheme,
    )


def check_packing(tensors: LayerTensors, per_word: int, *axes: int) -> None:
    """Refuses a layer whose axes are no whole words.

    Raises:
      ValueError: outputs (axis 0) or inputs (1) that do not divide.
    """
    for axis in axes:
        if tensors.shape[axis] % per_word:
            raise ValueError(
                f"layer {tensors.layer} has {tensors.shape[axis]} "
                f"{('outputs', 'inputs')[axis]}, no multiple of {per_word}"
            )
