"""GPTQ: rounding that makes up for its errors in the inputs that come after.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", algorithm 1, with the two changes that its authors' code
offers as options: inputs are taken in order of their size, largest first ("act order"),
and a group's scale is found beforehand ("static groups"), so that the order needs no
index beside the weights.
"""

import numpy as np

from headrace.checkpoints.clipping import clipped_scales
from headrace.checkpoints.dequantize import dequantize
from headrace.checkpoints.quantize import quantize_array, round_to
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

_DAMPING = 0.01
_BLOCK = 128


def gptq(weight: np.ndarray, hessian: np.ndarray, scheme: Scheme) -> QuantizedTensor:
    """Rounds a weight so that its products with given rows stay near.

    Args:
      weight: [O, I].
      hessian: x.T @ x over the rows x [R, I] of the calibration text, [I, I] float64.
      scheme: weight-only.

    Returns:
      Arrays of numpy.

    Raises:
      ValueError: the group size does not divide the inputs.
    """
    scales, zeros = clipped_scales(weight, np.diagonal(hessian), scheme)
    size = weight.shape[1] // scales.shape[1]
    order = np.argsort(-np.diagonal(hessian), kind="stable")
    upper = _inverse_factor(hessian[np.ix_(order, order)])
    left = weight[:, order].astype(np.float64)  # to be rounded, errors so far included
    values = np.empty(weight.shape, quantize_array(weight[:1], scheme).values.dtype)
    for begin in range(0, len(order), _BLOCK):
        end = min(begin + _BLOCK, len(order))
        errors = np.zeros((weight.shape[0], end - begin))
        for i in range(begin, end):
            group = slice(order[i] // size, order[i] // size + 1)
            scale, zero = scales[:, group], None if zeros is None else zeros[:, group]
            column = left[:, i : i + 1].astype(np.float32)
            stored = round_to(column[:, None], scale, zero, scheme)[:, 0]
            values[:, order[i]] = stored[:, 0]
            error = (left[:, i] - dequantize(stored, scale, zero)[:, 0]) / upper[i, i]
            left[:, i:end] -= np.outer(error, upper[i, i:end])
            errors[:, i - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return QuantizedTensor(values=values, scales=scales, zeros=zeros, scheme=scheme)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor of the damped inverse; inputs that never occur are 1."""
    damped = hessian.astype(np.float64).copy()
    diagonal = np.diagonal(damped).copy()
    unused = diagonal == 0
    damped[unused, unused] = 1
    damped[np.diag_indices_from(damped)] += _DAMPING * max(diagonal.mean(), 1e-30)
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T
