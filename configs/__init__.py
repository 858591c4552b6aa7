"""Configurations as plain data: one file per published model, and the schema.

Knows nothing of the rest of the package. `load_config(name)` takes a file's name.
"""

import importlib
import pathlib
from typing import TYPE_CHECKING

from headrace.configs.schema import EngineConfig, ModelConfig, RopeScaling

if TYPE_CHECKING:
    import ml_collections


def config_names() -> list[str]:
    """Names that `load_config` takes, sorted."""
    folder = pathlib.Path(__file__).parent
    skip = {
        "__init__", "checks", "drafts", "kv_types", "mapping", "model_config",
        "quantization", "schema",
    }  # fmt: skip
    return sorted(path.stem for path in folder.glob("*.py") if path.stem not in skip)


def load_config(name: str) -> "ml_collections.ConfigDict":
    """Returns `get_config()` of `configs/<name>.py`: keys `model` and `engine`.

    Raises:
      ValueError: no such file; the known names are listed.
    """
    if name not in config_names():
        raise ValueError(f"no config {name!r}; known: {config_names()}")
    return importlib.import_module(f"headrace.configs.{name}").get_config()


def parse_config(
    config: "ml_collections.ConfigDict",
) -> tuple[ModelConfig, EngineConfig]:
    """Checks a ConfigDict with the keys `model` and `engine`.

    Raises:
      ValueError: an unknown or missing key, or a value out of range.
    """
    unknown = set(config) - {"model", "engine"}
    if unknown:
        raise ValueError(
            f"a config has the keys 'model' and 'engine', not {sorted(unknown)}"
        )
    if "model" not in config:
        raise ValueError("a config needs the key 'model'")
    return (
        ModelConfig.from_mapping(config.model.to_dict()),
        EngineConfig.from_mapping(config.get("engine", {})),
    )


__all__ = [
    "EngineConfig",
    "ModelConfig",
    "RopeScaling",
    "config_names",
    "load_config",
    "parse_config",
]
