"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them, 4 or 8 bits.

Of a layer (out, in): qweight int32 [in * bits / 32, out], words along inputs from the
lowest bits on; qzeros int32 [groups, out * bits / 32], words along outputs; scales
[groups, out]; g_idx int32 [in], the group of each input (with act-order these are not
ascending). weight = (q - zero) * scale, where the format "gptq" stores zero - 1 and
"gptq_v2" the zero itself.

Source: github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py;
github.com/ModelCloud/GPTQModel, gptqmodel/quantization/config.py (`dynamic`).
"""

import dataclasses
import re
from typing import Any

import numpy as np

from headrace.checkpoints.host_memory import copied
from headrace.checkpoints.linear_format import (
    FormatOf,
    LayerTensors,
    check_packing,
    group_order,
    integer_weight,
    signed_values,
    unsigned_fields,
)
from headrace.checkpoints.quant_fields import Fields, is_named
from headrace.configs.quantization import Scheme
from headrace.layers.quantized import QuantizedTensor

_INFORMING = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential",
    "model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size",
    "pad_token_id", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize",
    "module_name_preceding_first_block", "cache_block_outputs", "max_input_length",
    "exllama_config", "use_exllama", "disable_exllama", "backend", "meta", "mse",
    "act_group_aware",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GPTQLinear:
    """See LinearFormat.

    Attributes:
      bits: 4 or 8.
      group_size: inputs that share a scale; None is one group.
      is_symmetric: every zero is half the range.
      has_act_order: `g_idx` may be in any order.
      zero_offset: what was subtracted from zeros before they were stored.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    has_act_order: bool
    zero_offset: int
    label: str = "gptq"
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def read(self, tensors: LayerTensors) -> QuantizedTensor:
        """See LinearFormat."""
        O, I = tensors.shape  # noqa: E741
        scheme = Scheme(
            values="int4" if self.bits == 4 else "int8",
            group_size=self.group_size,
            has_zeros=not self.is_symmetric,
        )
        S, per_word = scheme.num_groups(I), 32 // self.bits
        check_packing(tensors, per_word, 0, 1)
        order = self._order(tensors)
        words_WO = tensors.get("qweight", [(I // per_word, O)], "int32")
        zeros_SO = self._zeros(tensors, (S, O // per_word))
        return integer_weight(
            signed_values(copied(words_WO.T), self.bits, order),
            tensors.scales("scales", [(S, O)]).T,
            None if zeros_SO is None else zeros_SO.T,
            scheme=scheme,
            order=order,
        )

    def _order(self, tensors: LayerTensors) -> np.ndarray | None:
        if "g_idx" not in tensors.suffixes:
            if self.has_act_order:
                raise ValueError(
                    f"the checkpoint lacks {tensors.layer}.g_idx, and desc_act is true"
                )
            return None
        order = group_order(tensors, "g_idx", self.group_size)
        if order is not None and not self.has_act_order:
            raise ValueError(
                f"tensor {tensors.layer}.g_idx is in act-order, and desc_act in "
                f"quantization_config is false"
            )
        return order

    def _zeros(
        self, tensors: LayerTensors, shape: tuple[int, int]
    ) -> np.ndarray | None:
        """int8 [S, O], less half the range; None where all are 0 then."""
        name = f"{tensors.layer}.qzeros"
        stored = unsigned_fields(tensors.get("qzeros", [shape], "int32"), self.bits)
        most, half = 2**self.bits - 1, 2 ** (self.bits - 1)
        if self.zero_offset and (stored == most).any():
            # It is a zero of 0 or of 16, depending on who reads it.
            raise ValueError(
                f"tensor {name} stores {most} with checkpoint_format 'gptq', which has "
                f"more than one meaning; 'gptq_v2' has one"
            )
        zeros_SO = (stored.astype(np.int16) + self.zero_offset - half).astype(np.int8)
        if not self.is_symmetric:
            return zeros_SO
        if zeros_SO.any():
            raise ValueError(
                f"tensor {name} has other zero points than {half}, and sym in "
                f"quantization_config is true"
            )
        return None


def parse_gptq(fields: Fields) -> FormatOf:
    """How layers are stored, from quantization_config.

    Raises:
      ValueError: a field or value that is not known.
    """
    versions = ("gptq", "gptq_v2")
    version = fields.choice("checkpoint_format", *versions, default="gptq")
    fields.choice("format", version, default=version)
    offset = 1 if version == "gptq" else 0
    linear = _linear(fields, None, offset)
    has_head = fields.choice("lm_head", True, False, default=False)
    plain = fields.names("modules_to_not_convert")
    only = _only(fields)
    dynamic = _dynamic(fields, linear)
    fields.choice("pack_dtype", "int32", default="int32")
    fields.must_be_empty("is_marlin_format", "adapter", "rotation")
    fields.finish(*_INFORMING)

    def format_of(layer: str) -> GPTQLinear | None:
        if (layer == "lm_head" and not has_head) or is_named(layer, plain):
            return None
        if only and layer != "lm_head" and not is_named(layer, only):
            return None
        for pattern, found in dynamic:
            if pattern.match(layer):
                return found
        return linear

    return format_of


def _linear(fields: Fields, base: GPTQLinear | None, offset: int) -> GPTQLinear:
    """Of a config, or of what `dynamic` says beside it."""
    symmetric = base.is_symmetric if base else True
    act_order = base.has_act_order if base else False
    size = (base.group_size or -1) if base else -1
    return GPTQLinear(
        bits=fields.choice("bits", 4, 8, default=base.bits if base else None),
        group_size=fields.group_size(default=size),
        is_symmetric=fields.choice("sym", True, False, default=symmetric),
        has_act_order=fields.choice("desc_act", True, False, default=act_order),
        zero_offset=offset,
    )


def _only(fields: Fields) -> tuple[str, ...]:
    """Names of the layers that are quantized at all; empty is every one."""
    key = "modules_in_block_to_quantize"
    found: Any = fields.take(key) or []
    names: list[Any] = []
    for one in found if isinstance(found, list) else [found]:
        names += one if isinstance(one, list) else [one]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{fields.where}: {key} must hold names, got {found!r}")
    return tuple(names)


def _dynamic(
    fields: Fields, base: GPTQLinear
) -> list[tuple[re.Pattern[str], GPTQLinear | None]]:
    """Patterns of layers, the first that matches counts: "-:" is not quantized."""
    where = f"{fields.where}.dynamic"
    rules = Fields(fields.take("dynamic") or {}, where)
    found: list[tuple[re.Pattern[str], GPTQLinear | None]] = []
    for key, changes in rules.values.items():
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise ValueError(f"{where}: {key!r} is no pattern: {error}") from None
        linear = None
        if not key.startswith("-:"):
            own = Fields(changes, f"{where}[{key!r}]")
            linear = _linear(own, base, base.zero_offset)
            own.finish(*_INFORMING)
        found.append((pattern, linear))
    return found
