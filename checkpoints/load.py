"""Resolves what a user calls a model, and loads it.

In this order: a registry name, a .gguf file, a folder (our store, or Hugging Face's
layout), a hub id. `./x` and `/x` are paths, never hub ids. Parameters go to the device
one at a time, so that the host never holds the model twice.
"""

import dataclasses
import difflib
import hashlib
import logging
import os
import pathlib
import re

from headrace.checkpoints import registry
from headrace.checkpoints.cache_dir import cache_dir as default_cache_dir
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.name_map import assemble
from headrace.checkpoints.quality import load_quality, quality_line
from headrace.checkpoints.quantize import Rounding, placer_of, round_checkpoint
from headrace.checkpoints.quantized_tree import quantization_of
from headrace.checkpoints.shardings import Place, Shardings

__all__ = ["Checkpoint", "load_checkpoint"]

logger = logging.getLogger(__name__)


def load_checkpoint(
    model: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    rounding: Rounding | None = None,
    keep_packed: bool = False,
    shardings: Shardings = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Loads a model by name, file, folder or hub id.

    Args:
      model: see the header of this file.
      dtype: storage type of the parameters on the device, cast on the host.
      rounding: of weights on their way to the device; None leaves them. Weights that
        come quantized are never rounded: it must name what they are.
      keep_packed: keep a GGUF file's quantized tensors in as many bits where a scheme
        holds them exactly (`gguf_packed`); else all are expanded.
      shardings: see `shardings.Shardings`.
      cache_dir: see `cache_dir.cache_dir`.

    Raises:
      ValueError: nothing of that name, or a damaged, incomplete or unsupported
        source; what was tried and what is known is in the message.
    """
    name = os.fspath(model)
    if keep_packed and rounding is not None:
        raise ValueError("keep_packed and quantization exclude one another")
    place = placer_of(dtype, shardings, rounding)  # refuses before anything is fetched
    folder = default_cache_dir(cache_dir)
    path, digest = _find(name, folder)
    if path.is_file():
        checkpoint = load_gguf(path, place, identity=digest, keep_packed=keep_packed)
        return _described(_named(checkpoint, rounding), path, rounding)
    from headrace.checkpoints import orbax_store, safetensors_reader  # slow to import

    if orbax_store.is_store(path):
        checkpoint = orbax_store.load_store(path, dtype=dtype, shardings=shardings)
    elif safetensors_reader.is_quantized_folder(path):
        as_it_is = placer_of(dtype, shardings, None)
        checkpoint = safetensors_reader.load_folder(path, as_it_is)
    else:
        checkpoint = _named(safetensors_reader.load_folder(path, place), rounding)
        return _described(checkpoint, path, rounding)
    is_rounded = checkpoint.quantization is None
    checkpoint = round_checkpoint(checkpoint, rounding)
    return _described(checkpoint, path, rounding if is_rounded else None)


def _find(name: str, folder: pathlib.Path) -> tuple[pathlib.Path, str | None]:
    """The file or folder of a model, and its hash where that is known.

    Raises:
      ValueError: there is nothing of that name.
    """
    if name in registry.REGISTRY:
        return registry.fetch(name, folder), registry.REGISTRY[name].sha256
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return path, None
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{path} is a file, but no .gguf file; a folder of safetensors is "
                f"loaded by the folder's name"
            )
        return path, None
    if not _is_hub_id(name):
        raise ValueError(_unknown(name))
    from headrace.checkpoints.hub import download

    return download(name, folder), None


def _described(
    checkpoint: Checkpoint, path: pathlib.Path, rounding: Rounding | None
) -> Checkpoint:
    """A checkpoint with what is known of its quality, which is told."""
    if checkpoint.quantization is None:
        return checkpoint
    if rounding is not None:
        logger.info(
            "weights rounded to %s; scripts/quality_report.py says what that costs",
            checkpoint.quantization,
        )
        return checkpoint
    quality = load_quality(path, checkpoint.identity)
    checkpoint = dataclasses.replace(checkpoint, quality=quality)
    logger.info("%s", quality_line(checkpoint))
    return checkpoint


def _named(checkpoint: Checkpoint, rounding: Rounding | None) -> Checkpoint:
    """A checkpoint whose weights were rounded on their way says so."""
    return checkpoint if rounding is None else rounding.named(checkpoint)


def load_gguf(
    path: pathlib.Path,
    place: Place,
    *,
    identity: str | None = None,
    keep_packed: bool = False,
) -> Checkpoint:
    """Loads a .gguf file; its identity is the file's SHA-256.

    Args:
      path: the file.
      place: see `name_map.assemble`.
      identity: where it is known.
      keep_packed: see `load_checkpoint`.
    """
    from headrace.checkpoints import gguf_reader, gguf_source, gguf_tokenizer

    reader = gguf_reader.open_gguf(path)
    try:
        config = gguf_reader.model_config(reader)
        tokenizer = gguf_tokenizer.tokenizer_spec(reader)
        source = gguf_source.GGUFSource(reader, config, keep_packed=keep_packed)
        params = assemble(config, source, place)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    identity = identity or registry.file_sha256(path)
    scheme, skip = quantization_of(params) if keep_packed else (None, None)
    if scheme is not None:
        # Products with packed weights may round otherwise than with expanded ones.
        identity = hashlib.sha256(f"{identity}:packed".encode()).hexdigest()
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=identity,
        quantization=scheme,
        quantization_skip=skip,
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
