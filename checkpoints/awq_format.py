"""AWQ checkpoints as AutoAWQ writes them, version "gemm".

Of a layer (out, in) with groups of inputs: qweight int32 [in, out / 8], qzeros int32
[groups, out / 8], scales [groups, out]. A word holds 8 outputs of 4 bits, from its
lowest bits on outputs 0, 2, 4, 6, 1, 3, 5, 7 of the 8. weight = (q - zero) * scale,
both unsigned.

Source: github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and
awq/utils/packing_utils.py.
"""

import dataclasses

import numpy as np

from headrace.checkpoints.host_memory import empty
from headrace.checkpoints.int4_bytes import OFFSET_8
from headrace.checkpoints.linear_format import (
    FormatOf,
    LayerTensors,
    check_packing,
    integer_weight,
    row_blocks,
)
from headrace.checkpoints.quant_fields import Fields, is_named
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PER_WORD = 8


@dataclasses.dataclass(frozen=True)
class AWQLinear:
    """See LinearFormat; groups of `group_size` inputs, None is one group."""

    group_size: int | None
    label: str = "awq"
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()

    def read(self, tensors: LayerTensors) -> QuantizedTensor:
        """See LinearFormat."""
        O, I = tensors.shape  # noqa: E741
        scheme = Scheme(values="int4", group_size=self.group_size, has_zeros=True)
        S = scheme.num_groups(I)
        check_packing(tensors, _PER_WORD, 0)
        check_packing(tensors, 2, 1)
        words_IW = tensors.get("qweight", [(I, O // _PER_WORD)], "int32")
        values = empty((O, I // 2), np.uint8)
        for begin, end in row_blocks(O, I, _PER_WORD):
            block = words_IW[:, begin // _PER_WORD : end // _PER_WORD]
            fields = _fields(block)
            values[begin:end] = fields[:, 0::2] | fields[:, 1::2] << np.uint8(4)
        values ^= OFFSET_8
        zeros_OS = _fields(tensors.get("qzeros", [(S, O // _PER_WORD)], "int32"))
        return integer_weight(
            values,
            tensors.scales("scales", [(S, O)]).T,
            zeros_OS.view(np.int8) - np.int8(8),
            scheme=scheme,
        )


def _fields(words_XW: np.ndarray) -> np.ndarray:
    """Unsigned fields of words along outputs, as [O, X]."""
    octets = np.ascontiguousarray(words_XW).view(np.uint8)
    octets_XWB = octets.reshape(*words_XW.shape, 4)
    fields_WFX = np.empty((words_XW.shape[1], _PER_WORD, len(words_XW)), np.uint8)
    for place, output in enumerate(_ORDER):
        shifted = octets_XWB[..., place // 2] >> np.uint8(4 * (place % 2))
        fields_WFX[:, output] = (shifted & 15).T
    return fields_WFX.reshape(-1, len(words_XW))


def parse_awq(fields: Fields) -> FormatOf:
    """How layers are stored, from quantization_config.

    Raises:
      ValueError: a field or value that is not known.
    """
    fields.choice("version", "gemm", default="gemm")
    fields.choice("bits", 4)
    fields.choice("zero_point", True, default=True)
    plain = fields.names("modules_to_not_convert")
    linear = AWQLinear(fields.group_size())
    # How others run it.
    fields.finish(
        "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"
    )
    # The head never is: AutoAWQ quantizes the layers of blocks.
    return lambda layer: None if is_named(layer, ("lm_head", *plain)) else linear
