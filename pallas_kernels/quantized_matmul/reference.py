"""What quantized_matmul means, in numpy. The truth that tests hold others to."""

import numpy as np


def dequantize(
    values_OI: np.ndarray, scales_OS: np.ndarray, zeros_OS: np.ndarray | None = None
) -> np.ndarray:
    """The weight [O, I] that stored values stand for: (value - zero) * scale."""
    values = values_OI.astype(np.float32).reshape(*scales_OS.shape, -1)
    if zeros_OS is not None:
        values = values - zeros_OS.astype(np.float32)[..., None]
    return (values * scales_OS.astype(np.float32)[..., None]).reshape(values_OI.shape)


def quantized_matmul_reference(
    values_OI: np.ndarray,
    scales_OS: np.ndarray,
    zeros_OS: np.ndarray | None,
    x_RI: np.ndarray,
) -> np.ndarray:
    """Rows [R, I] times the dequantized weight -> [R, O], in float64 sums."""
    weight = dequantize(values_OI, scales_OS, zeros_OS).astype(np.float64)
    return (x_RI.astype(np.float64) @ weight.T).astype(np.float32)
