"""The model families, by the name that ModelConfig.family holds."""

from typing import Any

from headrace.configs.schema import ModelConfig


def build_model(
    config: ModelConfig,
    param_dtype: str,
    kv_skip: tuple[int, ...] = (),
    aux_layers: tuple[int, ...] = (),
) -> Any:
    """The Linen module of the config's family.

    Args:
      config: its shapes.
      param_dtype: of weights that are not quantized, and of what layers hand on.
      kv_skip: layers whose KV pages are stored in another type, see
        `kv_cache.KVStorage`.
      aux_layers: layers whose inputs are given as `ModelOutput.aux_hidden`.

    Raises:
      ValueError: no such family; the known ones are listed.
    """
    from headrace.layers.models.llama import Llama

    families = {"llama": Llama}
    if config.family not in families:
        raise ValueError(
            f"no model family {config.family!r}; known: {sorted(families)}"
        )
    return families[config.family](config, param_dtype, kv_skip, aux_layers)


def param_shapes(config: ModelConfig) -> dict:
    """The family's parameter tree with a shape tuple in each array's place."""
    from headrace.layers.models import llama

    return {"llama": llama.param_shapes}[config.family](config)
