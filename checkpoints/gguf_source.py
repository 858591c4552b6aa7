"""GGUF files as a TensorSource. The package `gguf` dequantizes.

llama.cpp stores the rows of q and k with rotated pairs side by side; they are put
back into the half-split order of Hugging Face.
"""

import dataclasses
import mmap
from typing import Any

import gguf
import numpy as np

from headrace.checkpoints.gguf_packed import packed_weight
from headrace.checkpoints.joins import HostWeight
from headrace.configs.schema import ModelConfig
from headrace.layers.quantized import QuantizedTensor

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """The file's tensors under Hugging Face names.

    Args:
      reader: of the file.
      config: of its model.
      keep_packed: matrices stay in fewer bits where that is exact (`gguf_packed`);
        else all are dequantized to float32.
    """

    def __init__(
        self, reader: gguf.GGUFReader, config: ModelConfig, *, keep_packed: bool = False
    ) -> None:
        self._config, self._keep_packed = config, keep_packed
        self._tensors = {_hf_name(t.name): t for t in reader.tensors}
        self._mapped = _mapped(reader)

    def names(self) -> list[str]:
        """All names; those without a counterpart keep their own."""
        return list(self._tensors)

    def read(self, name: str) -> HostWeight:
        """One tensor, (out, in), in float32 or in fewer bits.

        Raises:
          ValueError: a quantization that the package `gguf` cannot undo.
        """
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            # What was read of the file before need not stay in memory.
            self._mapped.madvise(mmap.MADV_DONTNEED)
        weight = self._read(name)
        for part, heads in (
            ("q_proj", self._config.num_heads),
            ("k_proj", self._config.num_kv_heads),
        ):
            if name.endswith(f"{part}.weight"):
                return _unpermute_rows(weight, heads)
        return weight

    def _read(self, name: str) -> HostWeight:
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        if self._keep_packed:
            try:
                packed = packed_weight(tensor.data, kind)
            except ValueError as error:
                raise ValueError(f"tensor {name}: {error}") from None
            if packed is not None:
                return packed
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {name} is stored as {kind}, which cannot be dequantized: "
                f"{error}"
            ) from None
        return np.ascontiguousarray(array, np.float32)


def _mapped(reader: gguf.GGUFReader) -> mmap.mmap | None:
    """What the reader's arrays are views of."""
    base: Any = reader.data
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _unpermute_rows(weight: HostWeight, num_heads: int) -> HostWeight:
    """`unpermute`, of all arrays that have a row per output."""
    if not isinstance(weight, QuantizedTensor):
        return unpermute(weight, num_heads)
    return dataclasses.replace(
        weight,
        values=unpermute(weight.values, num_heads),
        scales=unpermute(weight.scales, num_heads),
    )


def unpermute(w_OD: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order: row 2i + j of a head back to row i + j * H/2."""
    rows, columns = w_OD.shape
    half = rows // num_heads // 2
    pairs = w_OD.reshape(num_heads, half, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name
