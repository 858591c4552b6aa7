"""The only place that multiplies by a weight.

Weights are stored (out, in): arrays, or `QuantizedTensor`s. A packed weight may also be
a tuple of its parts, where these differ in scheme or in the order of their inputs.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator

import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from headrace.layers.quantized import QuantizedTensor
from headrace.layers.quantized_rows import quantize_rows
from headrace.pallas_kernels.quantized_matmul.api import (
    quantized_matmul,
    quantized_rows_matmul,
)
from headrace.pallas_kernels.row_matmul.api import row_matmul

Weight = Array | QuantizedTensor
PackedWeight = Weight | tuple[Weight, ...]


_SEEN: contextvars.ContextVar[list[Array] | None] = contextvars.ContextVar(
    "rows of products", default=None
)


_MOST_ROWS: contextvars.ContextVar[int] = contextvars.ContextVar(
    "most rows of a role's products", default=0
)


@contextlib.contextmanager
def rows_up_to(most_rows: int) -> Iterator[None]:
    """Products traced meanwhile are of a role none of whose products has more rows.

    Where a kernel's way of adding up depends on how many rows there are, it follows
    this and not its own rows, so that a row's bits do not depend on the bucket.
    """
    token = _MOST_ROWS.set(most_rows)
    try:
        yield
    finally:
        _MOST_ROWS.reset(token)


# What stands in for the products of quantized rows.
Product = Callable[[QuantizedTensor, Array], Array]
_INSTEAD: contextvars.ContextVar[Product | None] = contextvars.ContextVar(
    "product of quantized rows", default=None
)


@contextlib.contextmanager
def replacing(product: Product) -> Iterator[None]:
    """Products with quantized rows that are traced meanwhile are another function's.

    For comparisons with schemes that no engine can run, see `quality_outliers.py`.

    Args:
      product: of a weight [O, I] and rows [R, I], its `factors` and `order` applied;
        gives [R, O].
    """
    token = _INSTEAD.set(product)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


@contextlib.contextmanager
def recording() -> Iterator[list[Array]]:
    """Notes the rows of every product meanwhile, in order, for calibration.

    While a function is traced these are its own values, to be returned by it.
    """
    seen: list[Array] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def matmul(
    w_OI: Weight,
    x_XI: Float[Array, "*X I"],
    query_len_B: Int[Array, " B"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*X O"]:
    """Multiplies rows by a weight stored (out, in).

    Args:
      w_OI: the weight [O, I].
      x_XI: any number of leading axes.
      query_len_B: valid tokens of each row, if x is [B, T, I]; the rest is padding that
        need not be computed.
      out_dtype: of the result, to which the sums are rounded once; None is x's.

    Returns:
      `x @ w.T`, with x's leading axes.
    """
    x_RI = x_XI.reshape(-1, x_XI.shape[-1])
    if (seen := _SEEN.get()) is not None:
        seen.append(x_RI)
    if isinstance(w_OI, QuantizedTensor):
        y_RO = _quantized(w_OI, x_RI, query_len_B, out_dtype)
    else:
        y_RO = row_matmul(w_OI, x_RI, query_len_B, out_dtype)
    return y_RO.reshape(*x_XI.shape[:-1], w_OI.shape[0])


def _quantized(
    w: QuantizedTensor,
    x_RI: Float[Array, "R I"],
    query_len_B: Int[Array, " B"] | None,
    out_dtype: DTypeLike | None,
) -> Float[Array, "R O"]:
    dtype = out_dtype or x_RI.dtype
    if w.factors is not None:
        x_RI = x_RI * w.factors.astype(x_RI.dtype)
    if w.order is not None:
        x_RI = x_RI[:, w.order]
    if w.scheme.activations is None:
        return quantized_matmul(
            w.values, w.scales, w.zeros, x_RI, query_len_B,
            out_dtype=dtype, most_rows=_MOST_ROWS.get(),
        )  # fmt: skip
    if (product := _INSTEAD.get()) is not None:
        return product(w, x_RI).astype(dtype)
    values_RI, scales_R1 = quantize_rows(x_RI, w.scheme.activations, w.activation_scale)
    return quantized_rows_matmul(w.values, w.scales, values_RI, scales_R1, dtype)


def declare(
    module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> PackedWeight:
    """A module's parameter: a weight of this shape, or what stands for it.

    Args:
      module: has `param_dtype`, the type of a weight that is not quantized.
      name: of the parameter.
      shape: with the inputs last.
      axes: logical names of its axes.
    """
    if module.has_variable("params", name):
        value = module.get_variable("params", name)
        # flax would hold the arrays of a quantized weight against the one shape.
        if isinstance(value, QuantizedTensor | tuple):
            return value
    init = nn.with_logical_partitioning(kernel_init(shape[-1]), axes)
    return module.param(name, init, shape, jnp.dtype(module.param_dtype))


def embed(
    table_VD: Weight, tokens_BT: Int[Array, "B T"], dtype: DTypeLike
) -> Float[Array, "B T D"]:
    """Rows of an embedding table; `dtype` is what quantized ones become."""
    if not isinstance(table_VD, QuantizedTensor):
        return table_VD[tokens_BT]
    return table_VD.map_outputs(lambda array: array[tokens_BT]).dequantized(dtype)


def _rows(weight: Weight) -> Weight:
    """A weight [*O, I] as [O, I]."""
    outputs = math.prod(weight.shape[:-1])
    if isinstance(weight, QuantizedTensor):
        return weight.reshape_outputs(outputs)
    return weight.reshape(outputs, weight.shape[-1])


def packed_qkv(
    w_KJHD: PackedWeight,
    x_BTD: Float[Array, "B T D"],
    query_len_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Projects to queries, keys and values with one product.

    Args:
      w_KJHD: packed per kv head, J = G + 2: its G query heads, its key, its value; or
        a tuple of the three, [K, G, H, D], [K, H, D] and [K, H, D].
      x_BTD: normed hidden states.
      query_len_B: valid tokens of each row.

    Returns:
      q_BTKGH, k_BTKH, v_BTKH.
    """
    if isinstance(w_KJHD, tuple):
        q, k, v = (
            matmul(_rows(part), x_BTD, query_len_B).reshape(
                *x_BTD.shape[:2], *part.shape[:-1]
            )
            for part in w_KJHD
        )
        return q, k, v
    K, J, H, _ = w_KJHD.shape
    y_BTO = matmul(_rows(w_KJHD), x_BTD, query_len_B)
    y_BTKJH = y_BTO.reshape(*x_BTD.shape[:2], K, J, H)
    return y_BTKJH[..., : J - 2, :], y_BTKJH[..., J - 2, :], y_BTKJH[..., J - 1, :]


def packed_gate_up(
    w_2FD: PackedWeight,
    x_BTD: Float[Array, "B T D"],
    query_len_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """Projects to the gate and up halves of a gated MLP with one product.

    Args:
      w_2FD: [2, F, D], or a tuple of its two halves [F, D].
      x_BTD: normed hidden states.
      query_len_B: valid tokens of each row.
    """
    if isinstance(w_2FD, tuple):
        gate, up = (matmul(part, x_BTD, query_len_B) for part in w_2FD)
        return gate, up
    F = w_2FD.shape[1]
    y_BTO = matmul(_rows(w_2FD), x_BTD, query_len_B)
    return y_BTO[..., :F], y_BTO[..., F:]


def kernel_init(fan_in: int) -> nn.initializers.Initializer:
    """Normal with standard deviation 1 / sqrt(fan_in)."""
    return nn.initializers.normal(stddev=fan_in**-0.5)
