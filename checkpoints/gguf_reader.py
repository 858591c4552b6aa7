"""GGUF files: whether they are whole, and their config. The package `gguf` parses."""

import math
import os
import pathlib
import struct

import gguf
import numpy as np

from headrace.configs.schema import ModelConfig

_ARCHITECTURES = ("llama",)

# What the parser raises on bytes that are no valid file.
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, struct.error, OSError)


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
    """Opens a file and checks that all of its tensors lie within it.

    Raises:
      ValueError: no GGUF file, or a truncated or damaged one.
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ValueError(f"{path} is no GGUF file: it starts with {magic!r}")
    try:
        return _Reader(path)
    except _Truncated as error:
        raise ValueError(
            f"{path} is truncated: it has {size:,} bytes, {error}"
        ) from None
    except _DAMAGE as error:
        raise ValueError(
            f"{path} ({size:,} bytes) is truncated or damaged: {error}"
        ) from None


class _Truncated(Exception):
    """What the file lacks, in words."""


class _Reader(gguf.GGUFReader):
    """The package's reader, made to read fast and to notice a file that ends early.

    Without this, a slice of a memmap costs ten times that of a plain array (seconds
    for a vocabulary), and reading past the end gives short arrays in silence.
    """

    def _build_fields(self, offs: int, count: int) -> int:
        self.data = np.asarray(self.data)
        return super()._build_fields(offs, count)

    def _get(self, offset: int, dtype, count: int = 1, override_order=None):
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise _Truncated(f"its header alone reaches byte {end:,}")
        return super()._get(offset, dtype, count, override_order)

    def _build_tensors(self, start_offs: int, fields: list) -> None:
        end = 0
        for tensor in fields:
            _, _, _, dims, kind, offset = tensor.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[
                gguf.GGMLQuantizationType(kind[0])
            ]
            num_bytes = math.prod(dims.tolist()) // block * block_bytes
            end = max(end, int(start_offs) + int(offset[0]) + num_bytes)
        if end > self.data.size:
            raise _Truncated(f"its tensors end at byte {end:,}")
        super()._build_tensors(start_offs, fields)


def field(reader: gguf.GGUFReader, key: str, default: object = None) -> object:
    """A metadata value; `default` where the key is absent.

    Raises:
      ValueError: the key is absent and has no default, or its value is unreadable.
    """
    found = reader.get_field(key)
    if found is None:
        if default is None:
            raise ValueError(f"the GGUF file lacks the key {key!r}")
        return default
    try:
        return found.contents()
    except (*_DAMAGE, TypeError) as error:
        raise ValueError(f"the value of the key {key!r} is damaged: {error}") from None


def whole_number(reader: gguf.GGUFReader, key: str, default: int | None = None) -> int:
    """A metadata value that must be a whole number.

    Raises:
      ValueError: as `field`, or another kind of value.
    """
    value = field(reader, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"the key {key!r} must hold a whole number, got {value!r}")
    return value


def model_config(reader: gguf.GGUFReader) -> ModelConfig:
    """The model's config from the file's metadata.

    Raises:
      ValueError: an architecture that is not supported, or a missing key.
    """
    architecture = field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {architecture!r} is not supported; known: "
            f"{list(_ARCHITECTURES)}"
        )
    names = {tensor.name for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        raise ValueError(
            "this GGUF file stretches its rotary wavelengths by the table "
            "rope_freqs.weight, which is not supported yet; use the safetensors form"
        )

    def get(key: str, default: int | None = None) -> int:
        return whole_number(reader, f"llama.{key}", default)

    dim, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", dim // max(heads, 1))
    _check_rotation(reader, head_dim)
    stop_ids = [token_id(reader, key) for key in ("eos", "eot")]
    return ModelConfig(
        family="llama",
        num_layers=get("block_count"),
        model_dim=dim,
        ffw_dim=get("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(reader),
        context_len=get("context_length"),
        rope_base=_number(reader, "llama.rope.freq_base", 10000.0),
        # Stored as float32: 9.99999974e-06 means 1e-5.
        norm_eps=float(
            f"{_number(reader, 'llama.attention.layer_norm_rms_epsilon'):.3g}"
        ),
        tie_embeddings="output.weight" not in names,
        bos_id=token_id(reader, "bos"),
        stop_ids=tuple(dict.fromkeys(i for i in stop_ids if i is not None)),
    )


def _check_rotation(reader: gguf.GGUFReader, head_dim: int) -> None:
    """Refuses every other rotation than the plain one of whole heads.

    llama.cpp takes a scaling without a type as linear, and a factor of 0 as none;
    plain files that it wrote itself say "linear" with 0.
    """
    kind = field(reader, "llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ValueError(
            f"llama.rope.scaling.type {kind!r} is not supported; known: ['none']"
        )
    legacy = _number(reader, "llama.rope.scale_linear", 1.0)
    factor = _number(reader, "llama.rope.scaling.factor", legacy)
    if kind == "linear" and factor not in (0.0, 1.0):
        raise ValueError(
            f"llama.rope.scaling.type 'linear' is supported with the factor 1 only, "
            f"got {factor}"
        )
    attention = _number(reader, "llama.rope.scaling.attn_factor", 1.0)
    if attention != 1.0:
        raise ValueError(f"llama.rope.scaling.attn_factor must be 1, got {attention}")
    rotated = whole_number(reader, "llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"llama.rope.dimension_count must be the head's {head_dim}, since rotating "
            f"a part of a head is not supported, got {rotated}"
        )


def token_id(reader: gguf.GGUFReader, name: str) -> int | None:
    """The id of a special token such as `eos`, None where the file has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    return None if reader.get_field(key) is None else whole_number(reader, key)


def _number(reader: gguf.GGUFReader, key: str, default: float | None = None) -> float:
    value = field(reader, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the key {key!r} must hold a number, got {value!r}")
    return float(value)


def _vocab_size(reader: gguf.GGUFReader) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return int(tensor.shape[1])
    raise ValueError("the GGUF file lacks the matrix token_embd.weight")
