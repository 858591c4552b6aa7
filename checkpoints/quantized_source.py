"""Safetensors whose linear layers are quantized, as a TensorSource of whole weights.

The tensors of a quantized layer stand behind its weight's plain name, so that the map
of a family serves both. What `quantization_config` says and what the files hold must
agree; every field and every tensor is accounted for.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from headrace.checkpoints.awq_format import parse_awq
from headrace.checkpoints.compressed_tensors import parse_compressed_tensors
from headrace.checkpoints.fp8_format import parse_fp8
from headrace.checkpoints.gptq_format import parse_gptq
from headrace.checkpoints.joins import HostWeight
from headrace.checkpoints.linear_format import FormatOf, LayerTensors, LinearFormat
from headrace.checkpoints.name_map import source_shapes
from headrace.checkpoints.quant_fields import Fields
from headrace.checkpoints.safetensors_source import SafetensorsSource
from headrace.configs.schema import ModelConfig

_PARSERS: dict[str, Callable[[Fields], FormatOf]] = {
    "awq": parse_awq,
    "gptq": parse_gptq,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
}
# What torch has as a Linear: of our families, everything but embeddings and norms.
_LINEAR = ("_proj", "lm_head")


def parse_quantization(raw: Any) -> FormatOf:
    """How each layer is stored.

    Args:
      raw: `quantization_config` of config.json.

    Raises:
      ValueError: a method, field or value that is not known; it is named.
    """
    fields = Fields(raw, "quantization_config")
    method = fields.choice("quant_method", *_PARSERS)
    return _PARSERS[method](fields)


class QuantizedSource:
    """See TensorSource.

    Args:
      source: of the stored tensors.
      format_of: how layers are quantized.
      config: of the model.

    Raises:
      ValueError: a layer is quantized and should not be, the other way round, or it
        lacks one of its tensors.
    """

    def __init__(
        self, source: SafetensorsSource, format_of: FormatOf, config: ModelConfig
    ) -> None:
        self._source, self._config = source, config
        self._layers: dict[str, tuple[LinearFormat, set[str]]] = {}
        self._names: list[str] = []
        for name in source.names():
            layer, _, suffix = name.rpartition(".")
            form = format_of(layer) if layer.endswith(_LINEAR) else None
            if form and suffix in (*form.required, *form.optional):
                self._layers.setdefault(layer, (form, set()))[1].add(suffix)
            elif form and suffix == "weight":
                raise ValueError(
                    f"tensor {name} is not quantized; quantization_config says that "
                    f"{layer} is ({form.label}), by {', '.join(form.required)}"
                )
            else:
                self._names.append(name)
        if "lm_head" in self._layers and config.tie_embeddings:
            raise ValueError(
                "lm_head is quantized, and tie_word_embeddings says that it is the "
                "embedding, which is not"
            )
        for layer, (form, suffixes) in self._layers.items():
            for suffix in form.required:
                if suffix not in suffixes:
                    raise ValueError(
                        f"the checkpoint lacks {layer}.{suffix}, which "
                        f"quantization_config ({form.label}) asks for"
                    )

    def names(self) -> Iterable[str]:
        """All names, those of quantized layers as "layer.weight"."""
        return [*self._names, *(f"{layer}.weight" for layer in self._layers)]

    def read(self, name: str) -> HostWeight:
        """One weight, (out, in).

        Raises:
          ValueError: see LinearFormat.
        """
        layer = name.removesuffix(".weight")
        if layer not in self._layers:
            return self._source.read(name)
        form, suffixes = self._layers[layer]
        O, I = self._shapes[name]  # noqa: E741
        tensors = LayerTensors(layer, (O, I), suffixes, self._source.stored)
        try:
            return form.read(tensors)
        except ValueError as error:
            if layer in str(error):
                raise
            raise ValueError(f"layer {layer}: {error}") from None

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        # NOTE: not before `assemble` has seen that the config's layers are there.
        return source_shapes(self._config)
