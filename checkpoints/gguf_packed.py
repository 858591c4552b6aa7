"""GGUF tensors kept in about as many bits, where a scheme holds them exactly.

    Q8_0  int8-g32   value * d
    Q4_0  int4-g32   (q - 8) * d
    Q5_0  int8-g32   (q - 16) * d
    Q6_K  int8-g16   (q - 32) * (d * scale), the product of 11 and 8 bits in float32

Each has d in float16. Q4_1, Q5_1 and Q4_K add a minimum, which is no multiple of their
scale: no scheme with whole zero points holds it, so they are expanded.

Source: github.com/ggml-org/ggml, src/ggml-common.h (block_q8_0 and others) and
src/ggml-quants.c (dequantize_row_q8_0 and others).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.checkpoints.host_memory import empty
from headrace.checkpoints.int4_bytes import pack_int4
from headrace.checkpoints.linear_format import row_blocks
from headrace.configs.quantization import parse_scheme
from headrace.layers.quantized import QuantizedTensor

_Rows = tuple[np.ndarray, np.ndarray]  # values as kept here, and scales


def packed_weight(octets: np.ndarray, kind: str) -> QuantizedTensor | None:
    """A matrix in fewer bits, None where no scheme holds it exactly.

    Args:
      octets: uint8 [O, bytes of a row].
      kind: its type, such as "Q8_0".

    Returns:
      Host arrays; int4 as bytes.
    """
    if kind not in _KINDS or octets.ndim != 2:
        return None
    name, inputs, block_bytes, unpack = _KINDS[kind]
    blocks_OBX = octets.reshape(len(octets), -1, block_bytes)
    O, B, _ = blocks_OBX.shape  # noqa: E741
    scheme = parse_scheme(name)
    is_int4 = scheme.values == "int4"
    assert scheme.group_size
    width, dtype = B * inputs // (1 + is_int4), np.uint8 if is_int4 else np.int8
    values = empty((O, width), dtype)
    scales = empty((O, B * inputs // scheme.group_size), np.float32)
    for begin, end in row_blocks(O, B * inputs):
        got = unpack(blocks_OBX[begin:end])
        values[begin:end] = got[0].reshape(end - begin, -1)
        scales[begin:end] = got[1].reshape(end - begin, -1)
    if not np.isfinite(scales).all():
        raise ValueError("a scale is not finite")
    return QuantizedTensor(values=values, scales=scales, scheme=scheme)


def _scale(octets: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(octets).view(np.float16).astype(np.float32)


def _halves(octets: np.ndarray) -> np.ndarray:
    """Lower halves of all bytes, then upper halves."""
    return np.concatenate([octets & 15, octets >> np.uint8(4)], axis=-1)


def _q8_0(blocks: np.ndarray) -> _Rows:
    return blocks[..., 2:].view(np.int8), _scale(blocks[..., :2])


def _q4_0(blocks: np.ndarray) -> _Rows:
    values = _halves(blocks[..., 2:]).view(np.int8) - np.int8(8)
    return pack_int4(values), _scale(blocks[..., :2])


def _q5_0(blocks: np.ndarray) -> _Rows:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    values = _halves(blocks[..., 6:]) | fifth << np.uint8(4)
    return values.view(np.int8) - np.int8(16), _scale(blocks[..., :2])


def _q6_k(blocks: np.ndarray) -> _Rows:
    """Two halves of 128 values: 64 bytes of lower 4 bits, 32 of upper 2 each."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    upper = (high >> shifts & 3).reshape(*blocks.shape[:-1], 2, 128)
    values = (_halves(low) | upper << np.uint8(4)).view(np.int8) - np.int8(32)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
    return values, _scale(blocks[..., 208:]) * scales


_KINDS: dict[str, tuple[str, int, int, Callable[[Any], _Rows]]] = {
    "Q8_0": ("int8-g32", 32, 34, _q8_0),
    "Q4_0": ("int4-g32", 32, 18, _q4_0),
    "Q5_0": ("int8-g32", 32, 22, _q5_0),
    "Q6_K": ("int8-g16", 256, 210, _q6_k),
}
"""Type -> scheme, values and bytes of a block, and how it is unpacked."""
