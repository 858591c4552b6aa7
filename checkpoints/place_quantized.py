"""Puts weights in fewer bits on their devices: whole, cut by a mesh, or in parts."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from headrace.checkpoints.int4_bytes import bytes_to_int4, is_packed, weight_shape
from headrace.layers.quantized import QuantizedTensor


def place_quantized(tensor: QuantizedTensor, sharding: Any) -> QuantizedTensor:
    """Puts its arrays on their devices.

    Args:
      tensor: of host arrays; int4 also as bytes, see `int4_bytes`.
      sharding: of the weight; None is the default device.

    Raises:
      ValueError: it would cut a group, or the order of inputs.
    """
    places = array_shardings(tensor, sharding)

    def put(array: Any, place: Any) -> Any:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            # A view of a mapped file, which somebody may change under us.
            array = array.copy()
        return jax.device_put(array, place)

    placed = {
        name: put(array, getattr(places, name))
        for name, array in _arrays(tensor).items()
    }
    if is_packed(tensor):
        placed["values"] = bytes_to_int4(placed["values"], places.values)
    # So that the host's arrays are gone before the next ones are made.
    jax.block_until_ready(placed)
    return dataclasses.replace(tensor, **placed)


def array_shardings(tensor: QuantizedTensor, sharding: Any) -> QuantizedTensor:
    """The sharding of each of a tensor's arrays, in their places.

    Args:
      tensor: its shapes alone matter.
      sharding: of the weight; None gives Nones.

    Raises:
      ValueError: see `place_quantized`.
    """
    if not isinstance(sharding, NamedSharding):
        same = {name: sharding for name in _arrays(tensor)}
        # NOTE: of one device, so the same for arrays of any shape.
        return dataclasses.replace(tensor, **same)
    shape = weight_shape(tensor)
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    parts = _num_parts(sharding.mesh, spec[-1])
    groups = tensor.scales.shape[-1]
    if parts > 1 and (tensor.order is not None or groups > 1 and groups % parts):
        what = "act-order" if tensor.order is not None else f"{groups} groups"
        raise ValueError(
            f"a weight of {tensor.scheme.name} with {what} of inputs cannot be cut "
            f"into {parts} along its inputs"
        )
    last = spec[-1] if groups > 1 else None
    specs = {
        "values": spec,
        "scales": [*spec[:-1], last],
        "zeros": [*spec[:-1], last],
        "factors": [spec[-1]],
        "order": [],
        "activation_scale": [],
    }
    named = {
        name: NamedSharding(sharding.mesh, PartitionSpec(*specs[name]))
        for name in _arrays(tensor)
    }
    return dataclasses.replace(tensor, **named)


def part_sharding(sharding: Any, shape: tuple[int, ...], whole_ndim: int) -> Any:
    """Of a part of a packed weight that stays in parts, such as k of qkv.

    A part may lack the axis along which parts would be joined: [K, H, D] of
    [K, G + 2, H, D], [F, D] of [2, F, D]. It is the last but two.

    Raises:
      ValueError: the parts' axis is cut.
    """
    if not isinstance(sharding, NamedSharding) or len(shape) == whole_ndim:
        return sharding
    spec = [*sharding.spec, *[None] * (whole_ndim - len(sharding.spec))]
    if spec.pop(whole_ndim - 3) is not None:
        raise ValueError(f"parts of a weight cannot be cut by {sharding.spec}")
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _arrays(tensor: QuantizedTensor) -> dict[str, Any]:
    fields = (f.name for f in dataclasses.fields(tensor) if f.name != "scheme")
    return {n: getattr(tensor, n) for n in fields if getattr(tensor, n) is not None}


def _num_parts(mesh: Any, axes: Any) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    parts = 1
    for name in names:
        parts *= mesh.shape[name]
    return parts
