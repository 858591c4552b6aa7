"""How source tensors become one parameter: arrays, weights in fewer bits, or both.

A join only ever moves outputs, so it does the same to values, scales and zeros. What
does not share its order of inputs, its scheme or its scale of activations is not
joined but kept as a tuple of parts, which `layers/linear.py` multiplies one by one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.checkpoints.host_memory import empty
from headrace.configs.schema import ModelConfig
from headrace.layers.quantized import QuantizedTensor

HostWeight = np.ndarray | QuantizedTensor
"""What sources give: a host array, or a QuantizedTensor of them without factors."""


@dataclasses.dataclass(frozen=True)
class Join:
    """One way to join.

    Attributes:
      outputs: the leading axes that each part gets.
      axis: along which parts lie one after another; a part may lack it.
      num_axes: of the whole.
    """

    outputs: Callable[[ModelConfig], list[tuple[int, ...]]]
    axis: int = 0
    num_axes: int = 2

    def __call__(
        self, config: ModelConfig, parts: list[HostWeight]
    ) -> HostWeight | tuple[HostWeight, ...]:
        """One weight, or a tuple of its parts.

        Args:
          config: of the model.
          parts: [O, I] each, of host arrays. The list is emptied, so that nobody
            holds the parts while they are joined.
        """
        if len(parts) == 1:
            return parts.pop()
        shaped = [
            _reshape_outputs(part, outputs)
            for part, outputs in zip(parts, self.outputs(config), strict=True)
        ]
        parts.clear()
        if all(isinstance(part, np.ndarray) for part in shaped):
            return self._merge(shaped)
        if not _are_alike(shaped):
            return tuple(shaped)
        first: Any = shaped[0]
        arrays = {
            name: [getattr(part, name) for part in shaped]
            for name in ("values", "scales", "zeros")
            if getattr(first, name) is not None
        }
        kept = dict(order=first.order, activation_scale=first.activation_scale)
        scheme = first.scheme
        del shaped, first
        merged: dict[str, Any] = {n: self._merge(each) for n, each in arrays.items()}
        return QuantizedTensor(**merged, **kept, scheme=scheme)

    def _merge(self, parts: list[Any]) -> np.ndarray:
        """One array of several, which are let go of one by one."""
        whole = [
            part if part.ndim == self.num_axes else np.expand_dims(part, self.axis)
            for part in parts
        ]
        parts.clear()
        shape, dtype = list(whole[0].shape), np.result_type(*(p.dtype for p in whole))
        shape[self.axis] = sum(part.shape[self.axis] for part in whole)
        joined, begin = empty(tuple(shape), dtype), 0
        place: list[slice] = [slice(None)] * self.num_axes
        while whole:
            part = whole.pop(0)
            place[self.axis] = slice(begin, begin := begin + part.shape[self.axis])
            joined[tuple(place)] = part
            del part
        return joined


def _reshape_outputs(part: HostWeight, outputs: tuple[int, ...]) -> HostWeight:
    if isinstance(part, QuantizedTensor):
        return part.reshape_outputs(*outputs)
    return part.reshape(*outputs, part.shape[-1])


def _are_alike(parts: Sequence[Any]) -> bool:
    """Whether one product can take all of them."""
    first = parts[0]
    return all(
        isinstance(part, QuantizedTensor)
        and part.scheme == first.scheme
        and all(
            _is_same(getattr(part, name), getattr(first, name))
            for name in ("order", "activation_scale")
        )
        for part in parts
    )


def _is_same(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return np.array_equal(ours, theirs)


def _qkv_outputs(config: ModelConfig) -> list[tuple[int, ...]]:
    K, G, H = config.num_kv_heads, config.group_size, config.head_dim
    return [(K, G, H), (K, H), (K, H)]


# [K, G + 2, H, I]: each kv head's queries, its key, its value.
PACK_QKV = Join(_qkv_outputs, axis=1, num_axes=4)
STACK = Join(lambda config: [(config.ffw_dim,)] * 2, axis=0, num_axes=3)
SINGLE = Join(lambda config: [])
