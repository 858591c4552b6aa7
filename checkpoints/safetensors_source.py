"""The tensors of a folder's safetensors shards, views of mapped files.

The package `safetensors` checks each header against its file's size; the bytes are
read here, since it has no bfloat16 for numpy. Pages of the files that were read leave
the process's memory before the next tensor is read.
"""

import json
import mmap
import pathlib
from collections.abc import Iterable

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from headrace.checkpoints import hf_config

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_DTYPES = _FLOATS | {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}


class SafetensorsSource:
    """The tensors of a folder's shards by name, read when asked for.

    Args:
      folder: of the shards.
      file: the only one, if it has a name of its own.
    """

    def __init__(self, folder: pathlib.Path, file: str | None = None) -> None:
        self._tensors: dict[str, tuple[mmap.mmap, int, dict]] = {}
        self._mapped: mmap.mmap | None = None
        self.paths = [folder / file] if file else _shard_paths(folder)
        for path in self.paths:
            _check(path)
            mapped, start, header = _open(path)
            for name, entry in header.items():
                if name in self._tensors:
                    raise ValueError(f"{folder} has two tensors named {name}")
                self._tensors[name] = (mapped, start, entry)

    def names(self) -> Iterable[str]:
        """All names in all shards."""
        return self._tensors.keys()

    def read(self, name: str) -> np.ndarray:
        """One tensor of floats, (out, in), a view of the file in its stored type.

        Raises:
          ValueError: it is stored in another type than F32, F16 or BF16.
        """
        return self._view(name, _FLOATS)

    def stored(self, name: str) -> np.ndarray:
        """One tensor of any type that quantized checkpoints have.

        Raises:
          ValueError: another type.
        """
        return self._view(name, _DTYPES)

    def _view(self, name: str, dtypes: dict) -> np.ndarray:
        mapped, start, entry = self._tensors[name]
        if entry["dtype"] not in dtypes:
            raise ValueError(
                f"tensor {name} is stored as {entry['dtype']}; known: {list(dtypes)}"
            )
        if self._mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Views stay good: what is asked for again comes from the file.
            self._mapped.madvise(mmap.MADV_DONTNEED)
        self._mapped = mapped
        begin, end = entry["data_offsets"]
        # Offsets need not suit the type, and numpy's views need not be aligned.
        array = np.frombuffer(mapped, np.uint8)[start + begin : start + end]
        return array.view(dtypes[entry["dtype"]]).reshape(entry["shape"])


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


def _open(path: pathlib.Path) -> tuple[mmap.mmap, int, dict]:
    """The mapped file, where its tensors begin, and name -> dtype, shape, offsets.

    Source: the safetensors format, 8 bytes of length, JSON, data.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    return mapped, 8 + length, header
