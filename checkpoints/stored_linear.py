"""Layers whose values are stored one by one: int8, or fp8 e4m3, with their scales.

Of a layer (out, in): weight [out, in]; scales of the whole, of each output, of groups
of inputs, or of blocks; where activations are quantized statically, a scale of theirs.
weight = (stored - zero) * scale. Both compressed-tensors and the method "fp8" are so.

Source: github.com/neuralmagic/compressed-tensors, compressors/quantized_compressors;
docs.vllm.ai, quantization/fp8 (weight_scale, input_scale); DeepSeek-V3's
README_WEIGHTS.md (weight_scale_inv: it is multiplied by, one per 128 x 128).
"""

import dataclasses
from typing import Literal

import numpy as np

from headrace.checkpoints.host_memory import copied
from headrace.checkpoints.int4_bytes import pack_int4
from headrace.checkpoints.linear_format import (
    LayerTensors,
    integer_weight,
    row_blocks,
)
from headrace.configs.quantization import ActivationType, Scheme
from headrace.layers.quantized import QuantizedTensor

Strategy = Literal["tensor", "channel", "tensor or channel", "group", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLinear:
    """See LinearFormat.

    Attributes:
      bits: 4 or 8 of whole numbers, which take a byte each; None is fp8.
      strategy: what shares a scale.
      block: outputs and inputs that do, of the strategies "group" and "block".
      has_zeros: zero points beside the scales.
      activations: quantized before the product, see Scheme.
      is_static: their scale is stored.
      scale: suffix of the scales.
    """

    label: str
    bits: int | None
    strategy: Strategy
    block: tuple[int, int] | None = None
    has_zeros: bool = False
    activations: ActivationType | None = None
    is_static: bool = False
    scale: str = "weight_scale"

    @property
    def required(self) -> tuple[str, ...]:
        """See LinearFormat."""
        zeros = ("weight_zero_point",) if self.has_zeros else ()
        static = ("input_scale",) if self.is_static else ()
        return ("weight", self.scale, *zeros, *static)

    @property
    def optional(self) -> tuple[str, ...]:
        """See LinearFormat: zero points of symmetric schemes, which older ones have."""
        zeros = () if self.has_zeros else ("weight_zero_point",)
        return (*zeros, *(("input_zero_point",) if self.is_static else ()))

    @property
    def scheme(self) -> Scheme:
        """What it becomes; int4 may lack its group size."""
        values = {None: "float8_e4m3fn", 4: "int4", 8: "int8"}[self.bits]
        return Scheme(
            values=values,  # type: ignore[arg-type]
            group_size=self.block[1] if self.block else None,
            has_zeros=self.has_zeros,
            activations=self.activations,
        )

    def read(self, tensors: LayerTensors) -> QuantizedTensor:
        """See LinearFormat."""
        scheme = self.scheme
        scheme.num_groups(tensors.shape[1])  # refuses before anything is read
        shapes, zeros = self._shapes(tensors), None
        scales = self._spread(tensors, tensors.scales(self.scale, shapes))
        if self.has_zeros:
            stored = tensors.get("weight_zero_point", shapes, "int8")
            zeros = self._spread(tensors, stored)
        else:
            tensors.no_zeros("weight_zero_point")
        tensor = integer_weight(self._values(tensors), scales, zeros, scheme=scheme)
        if not self.is_static:
            return tensor
        tensors.no_zeros("input_zero_point")
        scale = tensors.scales("input_scale", [(), (1,), (1, 1)]).reshape(())
        if not scale > 0:
            raise ValueError(f"tensor {tensors.layer}.input_scale is not positive")
        return dataclasses.replace(tensor, activation_scale=scale)

    def _values(self, tensors: LayerTensors) -> np.ndarray:
        name, shapes = f"{tensors.layer}.weight", [tensors.shape]
        if self.bits is None:
            values = copied(tensors.get("weight", shapes, "float8_e4m3fn"))
            for begin, end in row_blocks(*values.shape):
                if (values[begin:end].view(np.uint8) & 127 == 127).any():
                    raise ValueError(f"tensor {name} is not finite")
            return values
        values = tensors.get("weight", shapes, "int8")
        if self.bits == 8:
            return copied(values)
        if values.min() < -8 or values.max() > 7:
            raise ValueError(f"tensor {name} has values that do not fit num_bits 4")
        return pack_int4(values)

    def _shapes(self, tensors: LayerTensors) -> list[tuple[int, ...]]:
        """What scales and zero points may look like."""
        O, I = tensors.shape  # noqa: E741
        if self.block:
            rows, columns = self.block
            return [(-(-O // rows), -(-I // columns))]
        tensor, channel = [(), (1,), (1, 1)], [(O, 1), (O,)]
        return {"tensor": tensor, "channel": channel}.get(
            self.strategy, tensor + channel
        )

    def _spread(self, tensors: LayerTensors, array: np.ndarray) -> np.ndarray:
        """One per output and group, [O, S]."""
        O = tensors.shape[0]  # noqa: E741
        if self.block:
            return np.repeat(array, self.block[0], axis=0)[:O]
        return np.broadcast_to(array.reshape(-1, 1), (O, 1)).copy()
