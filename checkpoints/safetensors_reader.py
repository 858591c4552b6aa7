"""Hugging Face folders: safetensors shards, config.json, tokenizer.json.

Weights may be quantized, as `quantization_config` in config.json says.
"""

import concurrent.futures
import hashlib
import os
import pathlib

from headrace.checkpoints import hf_config
from headrace.checkpoints.checkpoint import Checkpoint
from headrace.checkpoints.hf_tokenizer import tokenizer_spec
from headrace.checkpoints.name_map import TensorSource, assemble
from headrace.checkpoints.quantized_source import QuantizedSource, parse_quantization
from headrace.checkpoints.quantized_tree import quantization_of
from headrace.checkpoints.registry import file_sha256
from headrace.checkpoints.safetensors_source import SafetensorsSource
from headrace.checkpoints.shardings import Place


def load_folder(path: str | os.PathLike[str], place: Place) -> Checkpoint:
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
    quantization = hf_config.quantization_config(folder)
    tokenizer = tokenizer_spec(folder)
    stored = SafetensorsSource(folder)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        # Hashing lets go of the interpreter, so it runs beside the packing.
        digests = pool.map(file_sha256, stored.paths)
        try:
            source: TensorSource = stored
            if quantization is not None:
                format_of = parse_quantization(quantization)
                source = QuantizedSource(stored, format_of, config)
            params = assemble(config, source, place)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        content = [file_sha256(folder / "config.json"), *digests]
    scheme, skip = quantization_of(params) if quantization else (None, None)
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=tokenizer,
        identity=hashlib.sha256(" ".join(content).encode()).hexdigest(),
        quantization=scheme,
        quantization_skip=skip,
    )


def is_quantized_folder(path: pathlib.Path) -> bool:
    """Whether a folder's config.json says that its weights are quantized."""
    return hf_config.quantization_config(path) is not None
