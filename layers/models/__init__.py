"""The model families, by the name that ModelConfig.family holds."""

from typing import Any

from headrace.configs.schema import ModelConfig


def build_model(config: ModelConfig, param_dtype: str) -> Any:
    """The Linen module of the config's family.

    Raises:
      ValueError: no such family; the known ones are listed.
    """
    from headrace.layers.models.llama import Llama

    families = {"llama": Llama}
    if config.family not in families:
        raise ValueError(
            f"no model family {config.family!r}; known: {sorted(families)}"
        )
    return families[config.family](config, param_dtype)


def param_shapes(config: ModelConfig) -> dict:
    """The family's parameter tree with a shape tuple in each array's place."""
    from headrace.layers.models import llama

    return {"llama": llama.param_shapes}[config.family](config)
