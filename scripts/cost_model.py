"""From speed to money: prices of tokens, and GPUs for a demand. Pure.

    per token = price x GPUs / (tokens/s x 3600)
    GPUs      = requests/s x tokens per request
                / (tokens/s of a GPU x target utilization) x redundancy

A run has one cost; how it is split over input and output tokens is a choice:
by tokens (an input token costs `input_weight` output tokens; 1: all alike), or by the
device's time where it was measured (`prefill_share` of it is the input's).
"""

import dataclasses
import math
from typing import Any


def checked(
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
) -> float:
    """Returns `value`; ValueError with name, value and range unless it is in it."""
    low = above if least is None else least
    assert low is not None
    is_low_enough = value > low if least is None else value >= low
    if not (is_low_enough and value <= most and math.isfinite(value)):
        bound = f"above {low:g}" if least is None else f"at least {low:g}"
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{name} must be finite, {bound}{limit}, got {value}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prices:
    """What an engine costs, and how its cost is split.

    Attributes:
      per_gpu_hour: in any currency, 0 or more.
      num_gpus: that the engine runs on.
      input_weight: cost of an input token over that of an output token.
      prefill_share: part of the device's time that prefill takes; None: by tokens.
    """

    per_gpu_hour: float
    num_gpus: int = 1
    input_weight: float = 1.0
    prefill_share: float | None = None

    def __post_init__(self) -> None:
        checked("price_per_hour", self.per_gpu_hour, least=0)
        checked("engine_gpus", self.num_gpus, least=1)
        checked("input_weight", self.input_weight, least=0)
        if self.prefill_share is not None:
            checked("prefill_share", self.prefill_share, least=0, most=1)
            if self.input_weight != 1.0:
                raise ValueError(
                    "prefill_share and input_weight must not both be given, got "
                    f"{self.prefill_share} and {self.input_weight}"
                )


def token_prices(
    tokens_in: int, tokens_out: int, duration_s: float, prices: Prices
) -> dict[str, Any]:
    """Prices of a million tokens, so that together they pay for the run.

    Args:
      tokens_in, tokens_out: of the run, each above 0.
      duration_s: of the run, above 0.

    Returns:
      cost_per_m_tokens: each token alike.
      cost_per_m_input_tokens, cost_per_m_output_tokens: by the split.
      cost_per_m_output_tokens_alone: the output pays for all.
      total_tokens_per_s, split: the speed, and the split in words.
    """
    total = tokens_in + tokens_out
    cost = prices.per_gpu_hour * prices.num_gpus * duration_s / 3600
    if prices.prefill_share is not None:
        price_in = prices.prefill_share * cost / tokens_in
        price_out = (1 - prices.prefill_share) * cost / tokens_out
        split = f"prefill takes {prices.prefill_share:g} of the time"
    else:
        price_out = cost / (prices.input_weight * tokens_in + tokens_out)
        price_in = prices.input_weight * price_out
        split = f"an input token costs {prices.input_weight:g} output tokens"
    return {
        "split": split,
        "total_tokens_per_s": total / duration_s,
        "cost_per_m_tokens": cost / total * 1e6,
        "cost_per_m_input_tokens": price_in * 1e6,
        "cost_per_m_output_tokens": price_out * 1e6,
        "cost_per_m_output_tokens_alone": cost / tokens_out * 1e6,
    }


def capacity(
    requests_per_s: float,
    tokens_per_request: float,
    measured_tokens_per_s: float,
    *,
    num_gpus: int,
    target_utilization: float,
    redundancy: float,
) -> dict[str, Any]:
    """GPUs that serve a demand.

    Args:
      requests_per_s: 0 or more.
      tokens_per_request: in and out, as those measured are.
      measured_tokens_per_s: of one engine.
      num_gpus: of one engine.
      target_utilization: part of the measured speed to plan for, in (0, 1].
      redundancy: factor of the reserve, 1 or more.

    Returns:
      gpus_exact: by the formula; gpus_needed: of whole engines, engines_needed.

    Raises:
      ValueError: a value out of its range.
    """
    checked("demand_requests_per_s", requests_per_s, least=0)
    checked("tokens_per_request", tokens_per_request, above=0)
    checked("target_utilization", target_utilization, above=0, most=1)
    checked("redundancy", redundancy, least=1)
    usable = measured_tokens_per_s * target_utilization
    engines = requests_per_s * tokens_per_request / usable * redundancy
    # A hair over a whole number is rounding: 7 / (0.7 x 0.1) is 100.00000000000001.
    whole = math.ceil(engines * (1 - 1e-12))
    return {
        "tokens_per_request": tokens_per_request,
        "gpus_exact": engines * num_gpus,
        "engines_needed": whole,
        "gpus_needed": whole * num_gpus,
    }
