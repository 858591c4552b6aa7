"""Weights to fewer bits, rounded to nearest, one parameter at a time.

What needs data (AWQ, GPTQ, SmoothQuant) is not here; what makes a QuantizedTensor of
rounded values is, for them too.
"""

import dataclasses
import fnmatch
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.int4_bytes import weight_shape
from headrace.checkpoints.place_quantized import part_sharding, place_quantized
from headrace.checkpoints.shardings import Place, Shardings, placer, sharding_of
from headrace.configs.quantization import Scheme, parse_scheme
from headrace.configs.schema import EngineConfig
from headrace.layers.quantized import QuantizedTensor

# Largest stored values, symmetric; the least of int4 is -8, that of int8 -127.
_MOST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
_LEAST = {"int8": -127.0, "int4": -8.0, "float8_e4m3fn": -448.0}
_DTYPES: dict[str, Any] = {
    "int8": np.dtype(np.int8),
    "int4": np.dtype(ml_dtypes.int4),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounding:
    """Which weights are rounded, and how.

    Attributes:
      scheme: how.
      skip: patterns of parameters that are not, such as "embedding" or "layer_0/*".
    """

    scheme: Scheme
    skip: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: EngineConfig) -> "Rounding | None":
        """What an engine's config asks for."""
        if config.quantization is None:
            return None
        return cls(
            scheme=parse_scheme(config.quantization), skip=config.quantization_skip
        )

    def identity(self, of_weights: str) -> str:
        """Of weights that are rounded so."""
        facts = f"{of_weights}:{self.scheme}:{self.skip}"
        return hashlib.sha256(facts.encode()).hexdigest()

    def named(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint whose weights are rounded so, saying that they are."""
        return dataclasses.replace(
            checkpoint,
            quantization=self.scheme.name,
            identity=self.identity(checkpoint.identity),
        )


def quantize_array(weight: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """A weight rounded to the nearest values of a scheme.

    Args:
      weight: (out, in), with any leading axes for the outputs; finite.
      scheme: how.

    Returns:
      Arrays of numpy.

    Raises:
      ValueError: the group size does not divide the inputs, or a weight is not finite.
    """
    groups = scheme.num_groups(weight.shape[-1])
    grouped = weight.astype(np.float32).reshape(*weight.shape[:-1], groups, -1)
    if not np.isfinite(grouped).all():
        raise ValueError("a weight that is quantized must be finite")
    if scheme.has_zeros:
        scales, zeros = _asymmetric(grouped, scheme)
    else:
        most = np.abs(grouped).max(axis=-1)
        scales = _positive(most / np.float32(_MOST[scheme.values]))
        zeros = None
    values = round_to(grouped, scales, zeros, scheme)
    return QuantizedTensor(
        values=values.reshape(weight.shape), scales=scales, zeros=zeros, scheme=scheme
    )


def round_to(
    grouped: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, scheme: Scheme
) -> np.ndarray:
    """Stored values nearest to weights [*O, S, G], for given scales [*O, S]."""
    scaled = grouped / scales[..., None]
    if scheme.values != "float8_e4m3fn":
        scaled = np.rint(scaled)
    if zeros is not None:
        scaled += zeros.astype(np.float32)[..., None]
    low, high = _LEAST[scheme.values], _MOST[scheme.values]
    return np.clip(scaled, low, high).astype(_DTYPES[scheme.values])


def _asymmetric(grouped: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points; 0 is among the values that can be stored."""
    high, low = _MOST[scheme.values], _LEAST[scheme.values]
    least, most = grouped.min(-1).clip(max=0), grouped.max(-1).clip(min=0)
    scales = _positive((most - least) / np.float32(high - low))
    zeros = np.clip(np.rint(low - least / scales), low, high)
    return scales, zeros.astype(np.int8)


def _positive(scales: np.ndarray) -> np.ndarray:
    """A group of zeros may have any scale."""
    return np.where(scales > 0, scales, 1).astype(np.float32)


def is_skipped(path: Sequence[str], ndim: int, skip: Sequence[str]) -> bool:
    """Whether a parameter stays as it is: norms, and what a pattern names."""
    name = "/".join(path)
    return ndim < 2 or any(fnmatch.fnmatch(name, pattern) for pattern in skip)


def placer_of(dtype: str, shardings: Shardings, rounding: Rounding | None) -> Place:
    """As `shardings.placer`, for weights in fewer bits and tuples of parts as well.

    Args:
      dtype: of parameters that are not quantized.
      shardings: see `shardings.Shardings`.
      rounding: of arrays, on the host before they go; None leaves all. What comes
        quantized stays as it is.

    Raises:
      ValueError: as `placer` and `quantize_array`, with the parameter's name.
    """
    place = placer(dtype, shardings)

    def place_any(path: tuple[str, ...], weight: Any) -> Any:
        is_array = isinstance(weight, np.ndarray)
        if is_array and (
            rounding is None or is_skipped(path, weight.ndim, rounding.skip)
        ):
            return place(path, weight)
        try:
            sharding = sharding_of(shardings, path)
            if isinstance(weight, tuple):
                return _place_parts(weight, dtype, sharding)
            if is_array:
                weight = quantize_array(weight, rounding.scheme)
            return place_quantized(weight, sharding)
        except ValueError as error:
            raise ValueError(f"{'/'.join(path)}: {error}") from None

    return place_any


def _place_parts(parts: tuple[Any, ...], dtype: str, sharding: Any) -> tuple[Any, ...]:
    """Parts of a packed weight that are not joined, see `checkpoints/joins.py`."""
    ndims = [len(weight_shape(part)) for part in parts]
    # Of qkv the queries have as many axes as the whole; halves of gate_up have fewer.
    whole = max(ndims) if len(set(ndims)) > 1 else max(ndims) + 1
    placed = []
    for part in parts:
        own = part_sharding(sharding, weight_shape(part), whole)
        if isinstance(part, QuantizedTensor):
            placed.append(place_quantized(part, own))
        else:
            placed.append(placer(dtype, lambda path, own=own: own)((), part))
    return tuple(placed)


def round_checkpoint(checkpoint: Checkpoint, rounding: Rounding | None) -> Checkpoint:
    """A checkpoint with its weights rounded, each where it is.

    Args:
      checkpoint: on one device.
      rounding: None leaves it as it is.

    Raises:
      ValueError: it is quantized already, in another way.
    """
    if rounding is None or checkpoint.quantization == rounding.scheme.name:
        return checkpoint
    if checkpoint.quantization is not None:
        raise ValueError(
            f"the weights are quantized already, as {checkpoint.quantization}; "
            f"quantization must be None or that, got {rounding.scheme.name!r}"
        )

    def rounded(path: tuple[Any, ...], leaf: Any) -> Any:
        names = tuple(str(getattr(key, "key", key)) for key in path)
        if is_skipped(names, leaf.ndim, rounding.skip):
            return leaf
        return place_quantized(quantize_array(np.asarray(leaf), rounding.scheme), None)

    params = jax.tree_util.tree_map_with_path(rounded, checkpoint.params)
    return rounding.named(dataclasses.replace(checkpoint, params=params))


def quantized_shapes(shapes: dict, dtype: str, rounding: Rounding | None) -> dict:
    """The parameter tree of rounded weights, as shapes of device arrays.

    Args:
      shapes: of `layers.models.param_shapes`.
      dtype: of parameters that are not quantized.
      rounding: of the others; None leaves all.

    Raises:
      ValueError: a group size that does not divide the inputs of a weight.
    """

    def struct(path: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
        names = tuple(key.key for key in path)
        if rounding is None or is_skipped(names, len(shape), rounding.skip):
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        scheme = rounding.scheme
        grouped = (*shape[:-1], scheme.num_groups(shape[-1]))
        return QuantizedTensor(
            values=jax.ShapeDtypeStruct(shape, _DTYPES[scheme.values]),  # type: ignore[arg-type]
            scales=jax.ShapeDtypeStruct(grouped, jnp.float32),  # type: ignore[arg-type]
            zeros=jax.ShapeDtypeStruct(grouped, jnp.int8)  # type: ignore[arg-type]
            if scheme.has_zeros
            else None,
            scheme=scheme,
        )

    return jax.tree_util.tree_map_with_path(
        struct, shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
