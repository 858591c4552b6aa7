"""How an engine divides the memory of its device: one sum for everyone who asks.

`sizing.resolve` chooses the pool by it at start, `check_compiled` asks it again with
what the compiled programs really take, before anything is served, and the preflight
prints it for a device that is not there. Pure arithmetic.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

from headrace.configs.schema import EngineConfig, ModelConfig
from headrace.engine import memory_sizes as sizes
from headrace.engine.weight_sizes import draft_weights_bytes, weights_bytes

logger = logging.getLogger(__name__)

# Programs that write pages, as their names begin.
_WRITERS = ("decode", "verify", "propose", "prefill", "score", "copy", "load")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
      free_bytes: free before weights are loaded. On a GPU this is what is left of the
        share that XLA reserves when it starts: three quarters of the card, unless
        XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
      memory_fraction: share of `free_bytes` that is planned with; the rest is for what
        no shape tells, such as gaps between arrays.
      weights_bytes: all parameters.
      state_bytes: logits, slots, counts and biases of the slots.
      step_bytes: arguments and results of the steps in flight.
      temp_bytes: temporaries of the largest program; they run one at a time.
      are_temps_compiled: `temp_bytes` is what compiled programs take, no estimate.
      page_bytes: keys and values of one page.
      num_pages: pages in the pool, dummy page 0 included.
    """

    free_bytes: int
    memory_fraction: float
    weights_bytes: int
    state_bytes: int
    step_bytes: int
    temp_bytes: int
    are_temps_compiled: bool = False
    page_bytes: int
    num_pages: int = 0

    @property
    def budget_bytes(self) -> int:
        """What is planned with."""
        return int(self.free_bytes * self.memory_fraction)

    @property
    def fixed_bytes(self) -> int:
        """All but the pool."""
        return self.weights_bytes + self.state_bytes + self.step_bytes + self.temp_bytes

    @property
    def pool_bytes(self) -> int:
        """Keys and values of all pages."""
        return self.num_pages * self.page_bytes

    @property
    def used_bytes(self) -> int:
        """Everything together."""
        return self.fixed_bytes + self.pool_bytes

    @property
    def left_bytes(self) -> int:
        """Of the budget; negative where it is exceeded."""
        return self.budget_bytes - self.used_bytes

    @property
    def fitting_pages(self) -> int:
        """Most pages that the budget has room for; 0 where nothing fits."""
        return max(0, self.budget_bytes - self.fixed_bytes) // self.page_bytes

    def concurrent(self, num_tokens: int, page_size: int) -> int:
        """Requests of so many tokens that the pool holds at the same time, in full."""
        return max(0, self.num_pages - 1) // -(-num_tokens // page_size)

    def parts(self) -> str:
        """The sum but the pool, in words."""
        how = "compiled" if self.are_temps_compiled else "estimated"
        return (
            f"weights {self.weights_bytes:,}, logits and slots {self.state_bytes:,}, "
            f"steps in flight {self.step_bytes:,}, temporaries {self.temp_bytes:,} "
            f"({how})"
        )

    def budget(self) -> str:
        """What there is, in words."""
        return (
            f"{self.budget_bytes:,} bytes, memory_fraction {self.memory_fraction} of "
            f"{self.free_bytes:,} free bytes"
        )


def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    *,
    attention: sizes.Attention,
    free_bytes: int,
) -> MemoryPlan:
    """The plan of an engine whose programs are not compiled yet.

    Args:
      model: its shapes.
      config: resolved; without `num_pages` the plan has an empty pool.
      attention: who attends on the device.
      free_bytes: free on the device before weights are loaded.
    """
    assert config.param_dtype and config.memory_fraction
    return MemoryPlan(
        free_bytes=free_bytes,
        memory_fraction=config.memory_fraction,
        weights_bytes=weights_bytes(model, config) + draft_weights_bytes(config),
        state_bytes=sizes.state_bytes(model, config),
        step_bytes=sizes.step_bytes(model, config),
        temp_bytes=sizes.temp_bytes_bound(model, config, attention),
        page_bytes=sizes.page_bytes_of(model, config),
        num_pages=config.num_pages or 0,
    )


def with_compiled(plan: MemoryPlan, memory: Mapping[str, Sequence[int]]) -> MemoryPlan:
    """The plan with what the compiled programs take.

    Args:
      plan: of the same engine.
      memory: temporary and aliased bytes of every program, see Ledger.memory_facts.
    """

    def needed(name: str) -> int:
        temp_bytes, alias_bytes = memory[name]
        # A step that would not write in place would make a second pool.
        writes_pages = name.startswith(_WRITERS)
        return temp_bytes + max(0, plan.pool_bytes - alias_bytes) * writes_pages

    largest = max(needed(name) for name in memory)
    return dataclasses.replace(plan, temp_bytes=largest, are_temps_compiled=True)


def check_compiled(plan: MemoryPlan) -> None:
    """Holds a plan with compiled temporaries against the memory that is there.

    Raises:
      ValueError: it would run out of memory while serving.
    """
    numbers = (
        f"{plan.used_bytes:,} of {plan.free_bytes:,} free bytes: {plan.parts()}, "
        f"{plan.num_pages} pages {plan.pool_bytes:,}"
    )
    over = plan.used_bytes - plan.free_bytes
    if over > 0:
        fitting = max(0, plan.num_pages - -(-over // plan.page_bytes))
        raise ValueError(
            f"the compiled programs do not fit beside the pool: {numbers}; "
            + (
                f"set num_pages to at most {fitting}"
                if fitting > 1
                else "set num_slots or max_context_len lower"
            )
        )
    if plan.left_bytes < 0:
        logger.warning("memory: more than memory_fraction allows: %s", numbers)
    else:
        logger.info("memory: %s", numbers)


def largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number in [low, high] that fits; what is smaller must fit too."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
