"""A loaded model: config, parameters, tokenizer, identity."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from headrace.checkpoints.tokenizer_spec import TokenizerSpec
from headrace.configs.schema import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What every reader gives.

    Attributes:
      config: shapes and constants.
      params: the parameter tree (WORKSPACE.md), arrays on the device.
      tokenizer: None where the source has none.
      identity: hex digest that changes with the weights.
      quantization: name of the scheme of quantized weights, see
        configs/quantization.py; None where none are. Of several, one that the memory
        of weights can be planned by.
      quantization_skip: paths of the parameters that are not of that scheme, where
        the weights came quantized.
      calibration: how they were quantized with data (`calibrate.calibrated`).
      quality: what that cost, see `quality.py`; None where nobody has measured it.
    """

    config: ModelConfig
    params: dict
    tokenizer: TokenizerSpec | None
    identity: str
    quantization: str | None = None
    quantization_skip: tuple[str, ...] | None = None
    calibration: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None
