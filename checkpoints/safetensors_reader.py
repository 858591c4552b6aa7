"""Hugging Face folders: safetensors shards, config.json, tokenizer.json.

Tensors are views of mapped files until they are packed, in the type they are stored
in. The package `safetensors` checks each header against its file's size; the bytes are
read here, since it has no bfloat16 for numpy.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.checkpoints import hf_config
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.hf_tokenizer import tokenizer_spec
from headrace.checkpoints.name_map import assemble
from headrace.checkpoints.registry import file_sha256

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def load_folder(
    path: str | os.PathLike[str],
    place: Callable[[tuple[str, ...], np.ndarray], Any],
) -> Checkpoint:
    """Loads a folder in Hugging Face's layout.

    Args:
      path: folder with config.json, tokenizer.json and safetensors.
      place: see `name_map.assemble`.

    Returns:
      A checkpoint; its identity is a hash of config.json and of every shard's content.

    Raises:
      ValueError: a file is missing, damaged or says something unsupported; a tensor
        is missing, unused or of another shape than the config says.
    """
    folder = pathlib.Path(path)
    config = hf_config.model_config(folder)
    tokenizer = tokenizer_spec(folder)
    source = SafetensorsSource(folder)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # Hashing lets go of the interpreter, so it runs beside the packing.
        digests = pool.map(file_sha256, source.paths)
        try:
            params = assemble(config, source, place)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        content = [file_sha256(folder / "config.json"), *digests]
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=hashlib.sha256(" ".join(content).encode()).hexdigest(),
    )


class SafetensorsSource:
    """The tensors of a folder's shards by name, read when asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._tensors: dict[str, tuple[np.memmap, dict]] = {}
        self.paths = _shard_paths(folder)
        for path in self.paths:
            _check(path)
            buffer, header = _open(path)
            for name, entry in header.items():
                if name in self._tensors:
                    raise ValueError(f"{folder} has two tensors named {name}")
                self._tensors[name] = (buffer, entry)

    def names(self) -> Iterable[str]:
        """All names in all shards."""
        return self._tensors.keys()

    def read(self, name: str) -> np.ndarray:
        """One tensor, (out, in), a view of the file in its stored type.

        Raises:
          ValueError: it is stored in another type than F32, F16 or BF16.
        """
        buffer, entry = self._tensors[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"tensor {name} is stored as {entry['dtype']}; known: {list(_DTYPES)}"
            )
        begin, end = entry["data_offsets"]
        array = np.asarray(buffer)[begin:end].view(_DTYPES[entry["dtype"]])
        return array.reshape(entry["shape"])


def _shard_paths(folder: pathlib.Path) -> list[pathlib.Path]:
    index = folder / _INDEX
    if not index.exists():
        if not (folder / _SINGLE).exists():
            raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
        return [folder / _SINGLE]
    weight_map = hf_config.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no 'weight_map'")
    odd = [file for file in weight_map.values() if not isinstance(file, str)]
    if odd:
        raise ValueError(f"{index}: weight_map must hold file names, got {odd[0]!r}")
    paths = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise ValueError(f"{folder} lacks the shards {absent} that {_INDEX} names")
    return paths


def _check(path: pathlib.Path) -> None:
    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or damaged: {error}"
        ) from None


def _open(path: pathlib.Path) -> tuple[np.memmap, dict]:
    """The bytes after the header, and the header: name -> dtype, shape, offsets.

    Source: the safetensors format, 8 bytes of length, JSON, data.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return np.memmap(path, np.uint8, "r", offset=8 + length), header
