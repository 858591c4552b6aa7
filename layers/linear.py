"""The only place that multiplies by a weight.

Weights are stored (out, in). Quantized weights and LoRA will enter here and nowhere
else.
"""

from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from headrace.pallas_kernels.row_matmul.api import row_matmul


def matmul(
    w_OI: Float[Array, "O I"],
    x_XI: Float[Array, "*X I"],
    query_len_B: Int[Array, " B"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "*X O"]:
    """Multiplies rows by a weight stored (out, in).

    Args:
      w_OI: the weight.
      x_XI: any number of leading axes.
      query_len_B: valid tokens of each row, if x is [B, T, I]; the rest is padding that
        need not be computed.
      out_dtype: of the result, to which the sums are rounded once; None is x's.

    Returns:
      `x @ w.T`, with x's leading axes.
    """
    x_RI = x_XI.reshape(-1, x_XI.shape[-1])
    y_RO = row_matmul(w_OI, x_RI, query_len_B, out_dtype)
    return y_RO.reshape(*x_XI.shape[:-1], w_OI.shape[0])


def packed_qkv(
    w_KJHD: Float[Array, "K J H D"],
    x_BTD: Float[Array, "B T D"],
    query_len_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Projects to queries, keys and values with one product.

    Args:
      w_KJHD: packed per kv head, J = G + 2: its G query heads, its key, its value.
      x_BTD: normed hidden states.
      query_len_B: valid tokens of each row.

    Returns:
      q_BTKGH, k_BTKH, v_BTKH.
    """
    K, J, H, D = w_KJHD.shape
    y_BTO = matmul(w_KJHD.reshape(K * J * H, D), x_BTD, query_len_B)
    y_BTKJH = y_BTO.reshape(*x_BTD.shape[:2], K, J, H)
    return y_BTKJH[..., : J - 2, :], y_BTKJH[..., J - 2, :], y_BTKJH[..., J - 1, :]


def packed_gate_up(
    w_2FD: Float[Array, "2 F D"],
    x_BTD: Float[Array, "B T D"],
    query_len_B: Int[Array, " B"],
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """Projects to the gate and up halves of a gated MLP with one product."""
    _, F, D = w_2FD.shape
    y_BTO = matmul(w_2FD.reshape(2 * F, D), x_BTD, query_len_B)
    return y_BTO[..., :F], y_BTO[..., F:]


def kernel_init(fan_in: int) -> nn.initializers.Initializer:
    """Normal with standard deviation 1 / sqrt(fan_in)."""
    return nn.initializers.normal(stddev=fan_in**-0.5)
