"""Resolves what a user calls a model, and loads it.

In this order: a registry name, a .gguf file, a folder (our store, or Hugging Face's
layout), a hub id. `./x` and `/x` are paths, never hub ids. Parameters go to the device
one at a time, so that the host never holds the model twice.
"""

import difflib
import os
import pathlib
import re

from headrace.checkpoints import registry
from headrace.checkpoints.cache_dir import cache_dir as default_cache_dir
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.name_map import assemble
from headrace.checkpoints.shardings import Shardings, placer

__all__ = ["Checkpoint", "load_checkpoint"]


def load_checkpoint(
    model: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    shardings: Shardings = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Loads a model by name, file, folder or hub id.

    Args:
      model: see the header of this file.
      dtype: storage type of the parameters on the device, cast on the host.
      shardings: see `shardings.Shardings`.
      cache_dir: see `cache_dir.cache_dir`.

    Raises:
      ValueError: nothing of that name, or a damaged, incomplete or unsupported
        source; what was tried and what is known is in the message.
    """
    name = os.fspath(model)
    placer(dtype, shardings)  # refuses a bad dtype before anything is fetched
    folder = default_cache_dir(cache_dir)
    if name in registry.REGISTRY:
        path = registry.fetch(name, folder)
        digest = registry.REGISTRY[name].sha256
        return load_gguf(path, dtype=dtype, shardings=shardings, identity=digest)
    path = pathlib.Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is a file, but no .gguf file; a folder of safetensors is "
                f"loaded by the folder's name"
            )
        return load_gguf(path, dtype=dtype, shardings=shardings)
    if path.is_dir():
        return _load_folder(path, dtype=dtype, shardings=shardings)
    if _is_hub_id(name):
        from headrace.checkpoints.hub import download

        path = download(name, folder)
        return _load_folder(path, dtype=dtype, shardings=shardings)
    raise ValueError(_unknown(name))


def load_gguf(
    path: pathlib.Path,
    *,
    dtype: str = "float32",
    shardings: Shardings = None,
    identity: str | None = None,
) -> Checkpoint:
    """Loads a .gguf file; its identity is the file's SHA-256."""
    from headrace.checkpoints import gguf_reader, gguf_tokenizer

    reader = gguf_reader.open_gguf(path)
    try:
        config = gguf_reader.model_config(reader)
        tokenizer = gguf_tokenizer.tokenizer_spec(reader)
        source = gguf_reader.GGUFSource(reader, config)
        params = assemble(config, source, placer(dtype, shardings))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=identity or registry.file_sha256(path),
    )


def _load_folder(path: pathlib.Path, *, dtype: str, shardings: Shardings) -> Checkpoint:
    from headrace.checkpoints import orbax_store, safetensors_reader

    if orbax_store.is_store(path):
        return orbax_store.load_store(path, dtype=dtype, shardings=shardings)
    return safetensors_reader.load_folder(path, placer(dtype, shardings))


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
