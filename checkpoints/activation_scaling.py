"""Scales per input that make a weight easier to round: AWQ and SmoothQuant.

Both multiply the inputs of a weight by s and the rows by 1 / s (`factors` of the
QuantizedTensor), which changes no product. AWQ looks for the s that keeps the products
of a rounded weight nearest; SmoothQuant moves what is hard to round from the rows to
the weight, for schemes that round both.
"""

import dataclasses

import numpy as np

from headrace.checkpoints.clipping import clipped
from headrace.checkpoints.dequantize import dequantize
from headrace.checkpoints.quantize import quantize_array
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

_ALPHAS = np.arange(20) / 20


def awq(weight: np.ndarray, rows: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """Rounds a weight with the inputs that matter most kept nearest.

    Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization", equation 5:
    s = mean(|x|) ** alpha, alpha by a search over [0, 1); large weights are clipped
    where that helps, as in its authors' code.

    Args:
      weight: [O, I].
      rows: [R, I] of the calibration text.
      scheme: weight-only.

    Returns:
      Arrays of numpy; alpha 0, which scales nothing, is among the candidates.
    """
    rows = rows.astype(np.float32)
    size = np.abs(rows).mean(0).clip(1e-8)
    square = np.square(rows).mean(0)
    truth = rows @ weight.T
    best: tuple[float, QuantizedTensor] | None = None
    for alpha in _ALPHAS:
        scales = _centred(size**alpha)
        scaled = clipped(weight * scales, square / scales**2, scheme)
        found = dataclasses.replace(scaled, factors=1 / scales)  # type: ignore[arg-type]
        products = (rows * found.factors) @ _plain(found).T
        error = float(np.square(products - truth).sum(dtype=np.float64))
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    return best[1]


def smooth(
    weight: np.ndarray, most: np.ndarray, scheme: Scheme, alpha: float = 0.5
) -> QuantizedTensor:
    """Rounds a weight whose rows will be rounded as well.

    Source: Xiao et al. 2022, "SmoothQuant", equation 4:
    s_j = max(|x_j|) ** alpha / max(|w_j|) ** (1 - alpha).

    Args:
      weight: [O, I].
      most: largest absolute value of each input in the calibration text, [I].
      scheme: with activations.
      alpha: how much of the difficulty the weight takes.
    """
    of_weight = np.abs(weight).max(0).clip(1e-8)
    scales = most.clip(1e-8) ** alpha / of_weight ** (1 - alpha)
    return _scaled(weight, _centred(scales), scheme)


def _centred(scales: np.ndarray) -> np.ndarray:
    """Around 1, so that nothing leaves the range of its type."""
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


def _scaled(weight: np.ndarray, scales: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    rounded = quantize_array(weight * scales, scheme)
    return dataclasses.replace(rounded, factors=1 / scales)  # type: ignore[arg-type]


def _plain(tensor: QuantizedTensor) -> np.ndarray:
    """The rounded weight without its factors."""
    arrays = tensor.values, tensor.scales, tensor.zeros
    return dequantize(*arrays)  # type: ignore[arg-type]
