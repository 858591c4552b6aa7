"""A weight in fewer bits, as one pytree that layers, readers and sharding understand.

Its arrays are those of the weight that it stands for, (out, in) with any leading axes
for the outputs: values [*O, I], scales [*O, I / group]. So cutting or reshaping the
outputs does the same to each of them. value = (stored - zero) * scale, in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from headrace.configs.quantization import BITS, Scheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """A quantized weight.

    Attributes:
      values: int8, int4 or float8_e4m3fn, of the weight's shape. int4 takes half a
        byte on the device, whatever `nbytes` says.
      scales: one per output and group of inputs.
      zeros: of the same shape; None is 0.
      factors: what each input of a row is multiplied by before anything else, such as
        the inverse of SmoothQuant's; None is 1.
      order: which input of a row meets input i of the values (GPTQ's act-order); None
        is i.
      activation_scale: of quantized activations, where it is fixed; else each row has
        its own.
      scheme: static.
    """

    values: Num[Array, "*O I"]
    scales: Float[Array, "*O S"]
    zeros: Int[Array, "*O S"] | None = None
    factors: Float[Array, " I"] | None = None
    order: Int[Array, " I"] | None = None
    activation_scale: Float[Array, ""] | None = None
    scheme: Scheme = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        return self.values.shape

    def reshape_outputs(self, *outputs: int) -> "QuantizedTensor":
        """The same weight with other leading axes.

        Args:
          outputs: their sizes; the product stays what it is.
        """
        return self.map_outputs(lambda one: one.reshape(*outputs, one.shape[-1]))

    def map_outputs(self, change: Callable[[Array], Array]) -> "QuantizedTensor":
        """The weight whose arrays with an axis per output are changed, alike."""
        arrays = {"values": self.values, "scales": self.scales, "zeros": self.zeros}
        changed = {k: change(v) for k, v in arrays.items() if v is not None}
        return dataclasses.replace(self, **changed)

    def dequantized(self, dtype: DTypeLike = jnp.float32) -> Float[Array, "*O I"]:
        """The weight that it stands for, rows times which is the product.

        Rounded to float32 after the scale; `factors` and `order` are in it.
        """
        groups = self.scales.shape[-1]
        grouped = self.values.astype(jnp.float32).reshape(*self.shape[:-1], groups, -1)
        if self.zeros is not None:
            grouped -= self.zeros.astype(jnp.float32)[..., None]
        weight = (grouped * self.scales[..., None]).reshape(self.shape)
        if self.order is not None:
            weight = jnp.zeros_like(weight).at[..., self.order].set(weight)
        if self.factors is not None:
            weight *= self.factors
        return weight.astype(dtype)


def is_quantized(node: Any) -> bool:
    """For `is_leaf` of tree functions."""
    return isinstance(node, QuantizedTensor)


def tree_bytes(tree: Any) -> int:
    """Bytes of a parameter tree on the device, shapes or arrays."""
    return sum(
        -(-math.prod(leaf.shape) * _bits(leaf.dtype) // 8)
        for leaf in jax.tree.leaves(tree)
    )


def _bits(dtype: Any) -> int:
    name = jnp.dtype(dtype).name
    return BITS.get(name, 8 * jnp.dtype(dtype).itemsize)  # type: ignore[call-overload]
