"""Our own folder format: arrays through Orbax, everything else as JSON beside them.

Quantized weights stay so (`stored_tree`); quantization.json says what they are, and
calibration.json how they came to be. `headrace.json` is written last and lists the
SHA-256 of every other file but the quality report; loading checks them all, so a
damaged, edited or half-written store is refused. Arrays are restored straight into
their shardings.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from headrace.checkpoints.cache_dir import atomic_folder
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.hf_config import read_json
from headrace.checkpoints.quality import quality_path
from headrace.checkpoints.quantized_tree import quantization_of
from headrace.checkpoints.registry import file_sha256
from headrace.checkpoints.shardings import Shardings, sharding_of
from headrace.checkpoints.stored_tree import restored, store_tree, target
from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.configs.schema import ModelConfig
from headrace.layers.models import param_shapes

MANIFEST = "headrace.json"
_CONFIG, _TOKENIZER, _PARAMS = "model_config.json", "tokenizer_spec.json", "params"
_QUANTIZATION, _CALIBRATION = "quantization.json", "calibration.json"
# 2 may hold quantized weights.
_FORMAT, _FORMATS = 2, (1, 2)


def is_store(path: pathlib.Path) -> bool:
    """Whether a folder is, or was meant to become, a store."""
    return (path / MANIFEST).exists() or (path / _PARAMS).is_dir()


def save_store(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Writes a checkpoint as a new folder that appears whole or not at all.

    Its identity is derived from the checkpoint's and the storage type, since storing
    in fewer bits makes another model.

    Raises:
      ValueError: the folder exists already.
    """
    dtypes = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(checkpoint.params)})
    identity = f"{checkpoint.identity}:{','.join(dtypes)}"
    params, described = store_tree(checkpoint.params)
    with atomic_folder(path) as folder:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _PARAMS, params)
            checkpointer.wait_until_finished()
        if described:
            _write_json(folder / _QUANTIZATION, described)
        if checkpoint.calibration is not None:
            _write_json(folder / _CALIBRATION, dict(checkpoint.calibration))
        _write_json(folder / _CONFIG, checkpoint.config.to_mapping())
        if checkpoint.tokenizer is not None:
            spec = dataclasses.asdict(checkpoint.tokenizer)
            _write_json(folder / _TOKENIZER, spec)
        manifest = {
            "format": _FORMAT,
            "identity": hashlib.sha256(identity.encode()).hexdigest(),
            "sha256": _hashes(folder),
        }
        _write_json(folder / MANIFEST, manifest)


def load_store(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    shardings: Shardings = None,
) -> Checkpoint:
    """Loads a store after checking every file of it.

    Args:
      path: folder that `save_store` wrote.
      dtype: storage type on the device, of what is not quantized.
      shardings: see `shardings.Shardings`.

    Raises:
      ValueError: the store is half-written, damaged, edited or of a newer format.
    """
    folder = pathlib.Path(path).absolute()
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{folder} is half-written: it has no {MANIFEST}")
    manifest = read_json(folder / MANIFEST)
    _check(folder, manifest)
    config = ModelConfig.from_mapping(read_json(folder / _CONFIG))
    params = _restore(folder, config, dtype, shardings)
    scheme, skip = quantization_of(params)
    calibration = folder / _CALIBRATION
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=_tokenizer(folder),
        identity=manifest["identity"],
        quantization=scheme,
        quantization_skip=skip,
        calibration=read_json(calibration) if calibration.exists() else None,
    )


def _restore(
    folder: pathlib.Path, config: ModelConfig, dtype: str, shardings: Shardings
) -> dict:
    path = folder / _QUANTIZATION
    described = read_json(path) if path.exists() else {}

    def wanted(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
        names = tuple(key.key for key in keys)
        sharding = sharding_of(shardings, names)
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        if (own := described.get("/".join(names))) is not None:
            return target(own, sharding, dtype, len(shape))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    shapes = param_shapes(config)
    targets = jax.tree_util.tree_map_with_path(
        wanted, shapes, is_leaf=lambda node: isinstance(node, tuple)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.restore(folder / _PARAMS, targets)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{folder} does not hold the arrays that its {_CONFIG} says: {error}"
            ) from error
    for name, own in described.items():
        *parents, last = name.split("/")
        node = stored
        for key in parents:
            node = node[key]
        node[last] = restored(node[last], own)
    return stored


def _tokenizer(folder: pathlib.Path) -> TokenizerSpec | None:
    path = folder / _TOKENIZER
    return TokenizerSpec(**read_json(path)) if path.exists() else None


def _check(folder: pathlib.Path, manifest: dict) -> None:
    if manifest.get("format") not in _FORMATS:
        raise ValueError(
            f"{folder} has format {manifest.get('format')!r}; known: {list(_FORMATS)}"
        )
    listed, identity = manifest.get("sha256"), manifest.get("identity")
    if not isinstance(listed, dict) or not isinstance(identity, str):
        raise ValueError(f"{folder / MANIFEST} is damaged: no hashes or no identity")
    present = _hashes(folder)
    for name in sorted(listed.keys() | present.keys()):
        if name not in present:
            raise ValueError(f"{folder} lacks the file {name}")
        if name not in listed:
            raise ValueError(f"{folder} has the file {name}, unknown to {MANIFEST}")
        if listed[name] != present[name]:
            raise ValueError(
                f"{folder / name} is damaged or was edited: sha256 {present[name]}, "
                f"{MANIFEST} says {listed[name]}"
            )


def _hashes(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every file that is part of it, by path within the folder."""
    apart = (folder / MANIFEST, quality_path(folder))
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path not in apart
    )
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        digests = pool.map(lambda name: file_sha256(folder / name), names)
        return dict(zip(names, digests, strict=True))


def _write_json(path: pathlib.Path, content: dict) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
