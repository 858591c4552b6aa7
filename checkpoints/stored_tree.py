"""Parameter trees with quantized weights, as the plain trees that Orbax stores.

A quantized weight becomes a dict of its arrays; int4 (two to a byte) and fp8 are
stored as uint8. What they were is described as JSON, and made of it again on the
device, in whatever sharding is asked for then.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from headrace.checkpoints.int4_bytes import bytes_to_int4, int4_to_bytes
from headrace.checkpoints.place_quantized import array_shardings, part_sharding
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor, is_quantized

_ARRAYS = tuple(
    f.name for f in dataclasses.fields(QuantizedTensor) if f.name != "scheme"
)


def store_tree(params: dict) -> tuple[dict, dict[str, Any]]:
    """A tree of arrays, and what is quantized in it.

    Returns:
      The tree, and path such as "layer_0/qkv" -> its description; a list of
      descriptions where a weight is kept in parts.
    """
    described: dict[str, Any] = {}

    def store(node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, dict):
            return {key: store(child, (*path, key)) for key, child in node.items()}
        if isinstance(node, tuple):
            described["/".join(path)] = [_describe(part) for part in node]
            return {str(i): _arrays_of(part) for i, part in enumerate(node)}
        if is_quantized(node):
            described["/".join(path)] = _describe(node)
            return _arrays_of(node)
        return node

    return store(params, ()), described


def _describe(part: Any) -> dict[str, Any]:
    if not is_quantized(part):
        return {"shape": list(part.shape)}
    arrays = {n: getattr(part, n) for n in _ARRAYS if getattr(part, n) is not None}
    return {
        "scheme": dataclasses.asdict(part.scheme),
        "arrays": {n: [str(a.dtype), *a.shape] for n, a in arrays.items()},
    }


def _arrays_of(part: Any) -> Any:
    if not is_quantized(part):
        return part
    arrays = {n: getattr(part, n) for n in _ARRAYS if getattr(part, n) is not None}
    values = part.values
    if values.dtype == jnp.int4:
        arrays["values"] = int4_to_bytes(values)
    elif values.dtype == jnp.float8_e4m3fn:
        arrays["values"] = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return arrays


def target(described: Any, sharding: Any, dtype: str, ndim: int) -> Any:
    """What Orbax is to restore of a quantized weight.

    Args:
      described: see `store_tree`.
      sharding: of the whole weight.
      dtype: of parts that are not quantized.
      ndim: axes of the whole weight.

    Raises:
      ValueError: the description is damaged, or a sharding that would cut a group.
    """
    if isinstance(described, list):
        parts = [
            target(part, _own(part, sharding, ndim), dtype, ndim) for part in described
        ]
        return {str(i): part for i, part in enumerate(parts)}
    if "scheme" not in described:
        shape = tuple(described["shape"])
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    whole = _shapes(described)
    places = array_shardings(whole, sharding)
    structs = {}
    for name in described["arrays"]:
        struct = getattr(whole, name)
        shape, kind = struct.shape, struct.dtype
        if name == "values" and kind == jnp.int4:
            shape, kind = (*shape[:-1], shape[-1] // 2), jnp.dtype(jnp.uint8)
        elif name == "values" and kind == jnp.float8_e4m3fn:
            kind = jnp.dtype(jnp.uint8)
        structs[name] = jax.ShapeDtypeStruct(
            shape, kind, sharding=getattr(places, name)
        )
    return structs


def _own(part: Any, sharding: Any, ndim: int) -> Any:
    shape = part["arrays"]["values"][1:] if "scheme" in part else part["shape"]
    return part_sharding(sharding, tuple(shape), ndim)


def _shapes(described: dict[str, Any]) -> QuantizedTensor:
    """A QuantizedTensor of shapes.

    Raises:
      ValueError: the description is damaged.
    """
    try:
        structs = {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            for name, (dtype, *shape) in described["arrays"].items()
        }
        return QuantizedTensor(**structs, scheme=Scheme(**described["scheme"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"what is said of a quantized weight: {error}") from None


def restored(stored: Any, described: Any) -> Any:
    """A weight of what Orbax restored, in its own types again."""
    if isinstance(described, list):
        return tuple(restored(stored[str(i)], part) for i, part in enumerate(described))
    if "scheme" not in described:
        return stored
    arrays, values = dict(stored), stored["values"]
    kind = described["arrays"]["values"][0]
    if kind == "int4":
        arrays["values"] = bytes_to_int4(values, values.sharding)
    elif kind == "float8_e4m3fn":
        arrays["values"] = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    # So that what was read is gone before the next weight is made.
    jax.block_until_ready(arrays["values"])
    return QuantizedTensor(**arrays, scheme=Scheme(**described["scheme"]))
