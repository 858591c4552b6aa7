"""GPTQ: rounding that makes up for its errors in the inputs that come after.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers", algorithm 1, with its group scales taken when the group is
reached, and without a reordering of the inputs.
"""

import numpy as np

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
    inputs = weight.shape[1]
    size = inputs // scheme.num_groups(inputs)
    upper = _inverse_factor(hessian)
    left = weight.astype(np.float64)  # what is to be rounded, errors so far included
    values = np.empty(weight.shape, quantize_array(weight[:1], scheme).values.dtype)
    scales, zeros = [], []
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = np.zeros((weight.shape[0], end - begin))
        for i in range(begin, end):
            if i % size == 0:
                group = quantize_array(left[:, i : i + size], _one_group(scheme))
                scales.append(group.scales)
                zeros.append(group.zeros)
            column = left[:, i : i + 1].astype(np.float32)
            stored = round_to(column[:, None], scales[-1], zeros[-1], scheme)
            values[:, i] = stored[:, 0, 0]
            rounded = dequantize(values[:, i : i + 1], scales[-1], zeros[-1])[:, 0]
            error = (left[:, i] - rounded) / upper[i, i]
            left[:, i:end] -= np.outer(error, upper[i, i:end])
            errors[:, i - begin] = error
        left[:, end:] -= errors @ upper[begin:end, end:]
    return QuantizedTensor(
        values=values,
        scales=np.concatenate(scales, axis=1),
        zeros=np.concatenate(zeros, axis=1) if scheme.has_zeros else None,
        scheme=scheme,
    )


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """Upper Cholesky factor of the damped inverse; inputs that never occur are 1."""
    damped = hessian.astype(np.float64).copy()
    diagonal = np.diagonal(damped).copy()
    unused = diagonal == 0
    damped[unused, unused] = 1
    damped[np.diag_indices_from(damped)] += _DAMPING * max(diagonal.mean(), 1e-30)
    inverse = np.linalg.inv(damped)
    return np.linalg.cholesky((inverse + inverse.T) / 2).T


def _one_group(scheme: Scheme) -> Scheme:
    """The scheme of a slice that is one group."""
    return Scheme(values=scheme.values, has_zeros=scheme.has_zeros)
