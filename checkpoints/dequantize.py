"""The weights that rounded ones stand for, in numpy."""

import numpy as np


def dequantize(
    values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
) -> np.ndarray:
    """(value - zero) * scale in float32.

    Args:
      values: [*O, I].
      scales, zeros: [*O, S], of groups of I / S inputs; zeros may be None.
    """
    grouped = values.astype(np.float32).reshape(*scales.shape, -1)
    if zeros is not None:
        grouped -= zeros.astype(np.float32)[..., None]
    return (grouped * scales[..., None]).reshape(values.shape)
