"""Resolves what a user calls a model, and loads it.

In this order: a registry name, a .gguf file, a folder (our store, or Hugging Face's
layout), a hub id. `./x` and `/x` are paths, never hub ids. Parameters go to the device
one at a time, so that the host never holds the model twice.
"""

import dataclasses
import difflib
import os
import pathlib
import re

from headrace.checkpoints import orbax_store, registry, safetensors_reader
from headrace.checkpoints.cache_dir import cache_dir as default_cache_dir
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.name_map import assemble
from headrace.checkpoints.quantize import Rounding, placer_of, round_checkpoint
from headrace.checkpoints.shardings import Place, Shardings

__all__ = ["Checkpoint", "load_checkpoint"]


def load_checkpoint(
    model: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    rounding: Rounding | None = None,
    shardings: Shardings = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Loads a model by name, file, folder or hub id.

    Args:
      model: see the header of this file.
      dtype: storage type of the parameters on the device, cast on the host.
      rounding: of weights on their way to the device; None leaves them.
      shardings: see `shardings.Shardings`.
      cache_dir: see `cache_dir.cache_dir`.

    Raises:
      ValueError: nothing of that name, or a damaged, incomplete or unsupported
        source; what was tried and what is known is in the message.
    """
    name = os.fspath(model)
    place = placer_of(dtype, shardings, rounding)  # refuses before anything is fetched
    folder = default_cache_dir(cache_dir)
    if name in registry.REGISTRY:
        path = registry.fetch(name, folder)
        digest = registry.REGISTRY[name].sha256
        return _named(load_gguf(path, place, identity=digest), rounding)
    path = pathlib.Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is a file, but no .gguf file; a folder of safetensors is "
                f"loaded by the folder's name"
            )
        return _named(load_gguf(path, place), rounding)
    if not path.is_dir():
        if not _is_hub_id(name):
            raise ValueError(_unknown(name))
        from headrace.checkpoints.hub import download

        path = download(name, folder)
    if orbax_store.is_store(path):
        return round_checkpoint(
            orbax_store.load_store(path, dtype=dtype, shardings=shardings), rounding
        )
    return _named(safetensors_reader.load_folder(path, place), rounding)


def _named(checkpoint: Checkpoint, rounding: Rounding | None) -> Checkpoint:
    """A checkpoint whose weights were rounded on their way says so."""
    if rounding is None:
        return checkpoint
    return dataclasses.replace(
        checkpoint,
        quantization=rounding.scheme.name,
        identity=rounding.identity(checkpoint.identity),
    )


def load_gguf(
    path: pathlib.Path, place: Place, *, identity: str | None = None
) -> Checkpoint:
    """Loads a .gguf file; its identity is the file's SHA-256.

    Args:
      path: the file.
      place: see `name_map.assemble`.
      identity: where it is known.
    """
    from headrace.checkpoints import gguf_reader, gguf_tokenizer

    reader = gguf_reader.open_gguf(path)
    try:
        config = gguf_reader.model_config(reader)
        tokenizer = gguf_tokenizer.tokenizer_spec(reader)
        source = gguf_reader.GGUFSource(reader, config)
        params = assemble(config, source, place)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=identity or registry.file_sha256(path),
    )


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def _unknown(name: str) -> str:
    known = sorted(registry.REGISTRY)
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f", did you mean {near[0]!r}?" if near else ":"
    return (
        f"no model {name!r}{hint} it is no registry name (known: {known}), no file or "
        f"folder here, and no hub id of the form 'owner/name'"
    )
