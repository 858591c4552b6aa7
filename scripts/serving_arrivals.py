"""When the requests of a benchmark are sent. Pure: numbers in, seconds out.

bench_serving.py sends a request no earlier than its time here; where the number of
requests under way is bounded as well, it may be later.
"""

import math
from collections.abc import Sequence

import numpy as np


def gamma_arrivals(
    count: int, rate: float, burstiness: float, seed: int
) -> list[float]:
    """Arrivals whose gaps are Gamma distributed, the first at 0.

    A gap has mean 1 / rate and coefficient of variation 1 / sqrt(burstiness): 1 is a
    Poisson process, below 1 the requests come in bursts, above 1 more evenly.

    Args:
      count: requests, at least 0.
      rate: requests per second, above 0; infinite sends all at once.
      burstiness: shape of the distribution, above 0 and finite.
      seed: of the draw.

    Returns:
      Seconds since the start, ascending.

    Raises:
      ValueError: a value out of its range.

    Source: the gaps of `vllm bench serve`.
    """
    if not rate > 0:
        raise ValueError(f"request_rate must be above 0 (or inf), got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be above 0 and finite, got {burstiness}")
    if count == 0:
        return []
    rng = np.random.default_rng(seed)
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def replayed(times_s: Sequence[float]) -> list[float]:
    """Recorded times, moved so that the first is 0.

    Args:
      times_s: seconds on any clock, in order.

    Raises:
      ValueError: a time that is not finite, or is before the one above it.
    """
    before = -math.inf
    for place, time_s in enumerate(times_s):
        if not math.isfinite(time_s) or time_s < before:
            raise ValueError(
                f"arrival times must be finite and ascend, got {time_s} s after "
                f"{before} s at request {place}"
            )
        before = time_s
    return [time_s - times_s[0] for time_s in times_s]
