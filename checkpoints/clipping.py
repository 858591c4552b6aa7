"""Scales that clip the largest weights where that leaves less error of products.

Rounding to nearest takes the scale at which nothing is clipped, so one large weight
makes a whole group coarse. AWQ's and GPTQ's authors both search for a smaller one.
"""

import numpy as np

from headrace.checkpoints.dequantize import dequantize
from headrace.checkpoints.quantize import quantize_array, round_to
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

# What is tried, of the scale at which nothing is clipped.
_SHRINK = np.linspace(1.0, 0.6, 17, dtype=np.float32)


def clipped_scales(
    weight: np.ndarray, importance: np.ndarray, scheme: Scheme
) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales and zero points [O, S], by the error that each input's share leaves.

    Args:
      weight: [O, I].
      importance: mean square of each input, up to a factor, [I].
      scheme: weight-only.
    """
    widest = quantize_array(weight, scheme)
    grouped = weight.astype(np.float32).reshape(*widest.scales.shape, -1)
    weights = importance.astype(np.float32).reshape(widest.scales.shape[1], -1)
    best, least = widest.scales, np.full(widest.scales.shape, np.inf, np.float32)
    for shrink in _SHRINK:
        scales = widest.scales * shrink
        stored = round_to(grouped, scales, widest.zeros, scheme).reshape(weight.shape)
        off = weight - dequantize(stored, scales, widest.zeros)
        error = (off.reshape(grouped.shape) ** 2 * weights).sum(-1)
        best = np.where(error < least, scales, best)
        least = np.minimum(error, least)
    return best, widest.zeros


def clipped(
    weight: np.ndarray, importance: np.ndarray, scheme: Scheme
) -> QuantizedTensor:
    """A weight rounded to nearest with those scales; arguments as of them."""
    scales, zeros = clipped_scales(weight, importance, scheme)
    grouped = weight.astype(np.float32).reshape(*scales.shape, -1)
    values = round_to(grouped, scales, zeros, scheme).reshape(weight.shape)
    return QuantizedTensor(values=values, scales=scales, zeros=zeros, scheme=scheme)
