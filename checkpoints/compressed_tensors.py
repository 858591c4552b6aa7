"""compressed-tensors checkpoints, as llm-compressor writes them.

config_groups say how the layers that their targets match are quantized. The format
"pack-quantized" keeps whole numbers in int32 words, of a layer (out, in):
weight_packed [out, in * bits / 32], words along inputs from the lowest bits on, each
value plus half the range; weight_scale [out, groups]; weight_zero_point packed alike,
but along outputs; weight_g_idx [in] with act-order; weight_shape. The others store
values one by one, see stored_linear.py. weight = (value - zero) * scale.

Source: github.com/neuralmagic/compressed-tensors,
compressors/quantized_compressors/pack_quantized.py, quantization/quant_args.py,
quantization/quant_config.py.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.checkpoints.fp8_format import as_block
from headrace.checkpoints.host_memory import copied
from headrace.checkpoints.linear_format import (
    FormatOf,
    LayerTensors,
    LinearFormat,
    check_packing,
    group_order,
    integer_weight,
    signed_values,
    unsigned_fields,
)
from headrace.checkpoints.quant_fields import Fields
from headrace.checkpoints.stored_linear import StoredLinear
from headrace.configs.quantization import ActivationType, Scheme
from headrace.layers.quantized import QuantizedTensor

_LABEL = "compressed-tensors"
_TYPES: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_INFORMING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLinear:
    """See LinearFormat: whole numbers in words.

    Attributes:
      scheme: what it becomes; int4 may lack its group size.
      has_act_order: weight_g_idx may be in any order.
    """

    scheme: Scheme
    has_act_order: bool
    label: str = _LABEL

    @property
    def required(self) -> tuple[str, ...]:
        """See LinearFormat."""
        zeros = ("weight_zero_point",) if self.scheme.has_zeros else ()
        order = ("weight_g_idx",) if self.has_act_order else ()
        return ("weight_packed", "weight_scale", "weight_shape", *zeros, *order)

    @property
    def optional(self) -> tuple[str, ...]:
        """See LinearFormat."""
        return ()

    def read(self, tensors: LayerTensors) -> QuantizedTensor:
        """See LinearFormat."""
        O, I = tensors.shape  # noqa: E741
        bits = 4 if self.scheme.values == "int4" else 8
        S, per_word = self.scheme.num_groups(I), 32 // bits
        check_packing(tensors, per_word, 1)
        stored_shape = tensors.get("weight_shape", [(2,)], "int32", "int64").tolist()
        if stored_shape != [O, I]:
            raise ValueError(
                f"tensor {tensors.layer}.weight_shape says {stored_shape}, the config "
                f"{[O, I]}"
            )
        order = None
        if self.has_act_order:
            order = group_order(tensors, "weight_g_idx", self.scheme.group_size)
        words_OW = tensors.get("weight_packed", [(O, I // per_word)], "int32")
        return integer_weight(
            signed_values(copied(words_OW), bits, order),
            tensors.scales("weight_scale", [(O, S)]),
            self._zeros(tensors, bits, S),
            scheme=self.scheme,
            order=order,
        )

    def _zeros(self, tensors: LayerTensors, bits: int, S: int) -> np.ndarray | None:
        if not self.scheme.has_zeros:
            return None
        O = tensors.shape[0]  # noqa: E741
        shape = (-(-O * bits // 32), S)
        words = tensors.get("weight_zero_point", [shape], "int32")
        stored_OS = unsigned_fields(words.T, bits)[:, :O].T
        return (stored_OS.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def parse_compressed_tensors(fields: Fields) -> FormatOf:
    """How layers are stored, from quantization_config.

    Raises:
      ValueError: a field or value that is not known.
    """
    fields.choice("quantization_status", "compressed", default="compressed")
    form = fields.choice("format", *_TYPES, "mixed-precision")
    ignored = fields.names("ignore")
    groups = Fields(fields.take("config_groups"), f"{fields.where}.config_groups")
    fields.must_be_empty("kv_cache_scheme", "transform_config")
    _no_sparsity(fields)
    fields.finish("global_compression_ratio", "version", "run_compressed")
    found: list[tuple[tuple[str, ...], LinearFormat]] = []
    for name, raw in groups.values.items():
        group = Fields(raw, f"{groups.where}.{name}")
        found.append((group.names("targets"), _group(group, form)))

    def format_of(layer: str) -> LinearFormat | None:
        if any(_rank(layer, name) is not None for name in ignored):
            return None
        ranked = [(_best(layer, targets), linear) for targets, linear in found]
        matching = [(rank, linear) for rank, linear in ranked if rank is not None]
        # The first of those that name it most closely.
        return min(matching, key=lambda one: one[0])[1] if matching else None

    return format_of


def _rank(layer: str, target: str) -> int | None:
    """How closely a target names a layer: 0 by name, 1 by pattern, 2 by class."""
    if target == layer:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), layer) else None
    return 2 if target == "Linear" else None


def _best(layer: str, targets: Iterable[str]) -> int | None:
    ranks = [rank for t in targets if (rank := _rank(layer, t)) is not None]
    return min(ranks, default=None)


def _no_sparsity(fields: Fields) -> None:
    sparsity = fields.take("sparsity_config") or {}
    form = sparsity.get("format", "dense") if isinstance(sparsity, dict) else sparsity
    if form != "dense":
        raise ValueError(
            f"{fields.where}: sparsity_config {form!r} is not supported; known: "
            f"['dense']"
        )


def _group(group: Fields, form: str) -> LinearFormat:
    """How the layers of one of config_groups are stored."""
    form = group.choice("format", *_TYPES, default=form)
    weights = Fields(group.take("weights"), f"{group.where}.weights")
    inputs = group.take("input_activations")
    group.must_be_empty("output_activations")
    group.finish()
    kind = weights.choice("type", *_TYPES[form], default="int")
    allowed_bits = (4, 8) if kind == "int" else (8,)
    bits = weights.choice("num_bits", *allowed_bits, default=8)
    has_zeros = not weights.choice("symmetric", True, False, default=True)
    strategy, block = _strategy(weights, is_packed=form == "pack-quantized")
    weights.choice("dynamic", False, default=False)
    order = weights.choice(
        "actorder", "group", "weight", "dynamic", "static", True, False, default=False
    )
    has_order = order in ("group", "dynamic", True)
    weights.finish(*_INFORMING)
    activations, is_static = _activations(inputs, group.where, kind, strategy)
    linear = StoredLinear(
        label=_LABEL,
        bits=None if kind == "float" else bits,
        strategy=strategy,
        block=block,
        has_zeros=has_zeros,
        activations=activations,
        is_static=is_static,
    )
    try:
        scheme = linear.scheme
    except ValueError as error:
        raise ValueError(f"{group.where}: input_activations: {error}") from None
    if form == "pack-quantized" and not is_static:
        return PackedLinear(scheme=scheme, has_act_order=has_order)
    if has_order or form == "pack-quantized":
        raise ValueError(
            f"{group.where}: format {form!r} is not supported with actorder {order!r} "
            f"and input_activations {inputs!r}"
        )
    return linear


def _strategy(weights: Fields, is_packed: bool) -> tuple[Any, tuple[int, int] | None]:
    """What shares a scale, and outputs and inputs of a block of it."""
    size = weights.group_size()
    inferred = "group" if size else "tensor"
    if weights.take("group_size") == -1:
        inferred = "channel"
    known = ["channel", "group"] + ([] if is_packed else ["tensor", "block"])
    strategy = weights.choice("strategy", *known, default=inferred)
    if size is not None and strategy != "group":
        raise ValueError(
            f"{weights.where}: group_size {size} is not supported with strategy "
            f"{strategy!r}; known: [None, -1]"
        )
    structure = weights.take("block_structure")
    if strategy == "block":
        if isinstance(structure, str):  # "128x128" in older files
            parts = structure.split("x")
            structure = [int(p) if p.isdecimal() else p for p in parts]
        return strategy, as_block(structure, f"{weights.where}: block_structure")
    if strategy == "group":
        if size is None:
            raise ValueError(f"{weights.where}: strategy 'group' needs a group_size")
        return strategy, (1, size)
    return strategy, None


def _activations(
    raw: Any, where: str, kind: str, strategy: str
) -> tuple[ActivationType | None, bool]:
    """Type to which activations are quantized, and whether by a stored scale."""
    if raw is None:
        return None, False
    fields = Fields(raw, f"{where}.input_activations")
    fields.choice("type", kind, default="int")
    fields.choice("num_bits", 8, default=8)
    fields.choice("symmetric", True, default=True)
    is_dynamic = fields.choice("dynamic", True, False, default=False)
    known = ("token",) if is_dynamic else ("tensor",)
    if strategy == "block":
        # They are left as they are there, which loses less.
        fields.choice("dynamic", True)
        known = ("token", "group")
    fields.choice("strategy", *known, default="tensor")
    fields.must_be_empty("block_structure", "actorder")
    fields.finish(*_INFORMING, "group_size")
    if strategy == "block":
        return None, False
    return "int8" if kind == "int" else "float8_e4m3fn", not is_dynamic
