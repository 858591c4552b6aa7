"""Chooses the sizes that a config leaves open, from the model and the free memory.

Pure arithmetic on the host: the same numbers come out for a named GPU on a machine
that has none. Everything is allocated at start, so what does not fit is refused here,
with the nearest thing that does (`nearest`). memory_plan.py has the sums.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from headrace.configs.kv_types import check_kv_skip
from headrace.configs.schema import Dtype, EngineConfig, ModelConfig
from headrace.engine import memory_plan
from headrace.engine.memory_plan import MemoryPlan
from headrace.engine.memory_sizes import Attention, pages_per_request
from headrace.engine.weight_sizes import draft_weights_bytes

# On a CPU the pool shares its memory with the user's programs, and is filled with
# zeros at start: half a second a gigabyte.
_CPU_FRACTION, _CPU_POOL_BYTES = 0.5, 2 * 2**30
_GPU_FRACTION = 0.88
_HOST_FRACTION = 0.25
_KERNELS_CAPABILITY = (9, 0)  # of the Mosaic kernels


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What sizing needs to know of the device.

    Attributes:
      platform: "cpu" or "gpu".
      free_bytes: memory that is free before weights are loaded.
      host_free_bytes: the host's, where that is not the device's own.
      capability: compute capability of an NVIDIA GPU, such as (9, 0).
      weights_bytes: of weights at hand, where the config does not say them.
    """

    platform: str
    free_bytes: int
    host_free_bytes: int = 0
    capability: tuple[int, int] | None = None
    weights_bytes: int | None = None

    @property
    def attention(self) -> Attention:
        """Who attends there."""
        if self.platform == "cpu":
            return "cpu"
        return "kernels" if self.capability == _KERNELS_CAPABILITY else "xla"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nearest:
    """What fits where a config does not; None where no value of it alone helps.

    Attributes:
      max_context_len: the longest, in whole pages, with everything else as it is.
      num_slots: the most, likewise.
      context_of_one_slot: the longest context with a single slot.
      num_devices: devices of the kind that hold the weights, were they cut up.
    """

    max_context_len: int | None
    num_slots: int | None
    context_of_one_slot: int | None
    num_devices: int

    def text(self) -> str:
        """What to do, in words."""
        offers = []
        if self.max_context_len is not None:
            offers.append(f"lower max_context_len to {self.max_context_len}")
        if self.num_slots is not None:
            offers.append(f"lower num_slots to {self.num_slots}")
        if not offers and self.context_of_one_slot is not None:
            offers.append(
                f"lower num_slots to 1 and max_context_len to "
                f"{self.context_of_one_slot}"
            )
        if offers:
            return f"{' or '.join(offers)}, or raise memory_fraction"
        if self.num_devices > 1:
            return (
                f"no context fits: at this memory_fraction the weights alone need "
                f"{self.num_devices} such devices, and sharding is not there yet"
            )
        return "no context fits beside the weights; raise memory_fraction"


def default_dtype(device: DeviceFacts) -> Dtype:
    """Storage type of weights and KV pages where the config leaves it open.

    A CPU without bfloat16 arithmetic reads bfloat16 weights twenty times slower.
    """
    return "float32" if device.platform == "cpu" else "bfloat16"


def resolve(
    model: ModelConfig, config: EngineConfig, device: DeviceFacts
) -> EngineConfig:
    """Returns the config with every None replaced.

    Raises:
      ValueError: the context is longer than the model's, or weights and one request
        do not fit into the memory.
    """
    settled = _settle(model, config, device)
    plan = plan_of(model, settled, device)
    is_open, least = settled.num_pages is None, pages_per_request(settled) + 1
    if (is_open or plan.left_bytes < 0) and plan.fitting_pages < least:
        raise ValueError(_too_small(model, config, device))
    if plan.left_bytes < 0:
        raise ValueError(
            f"num_pages {plan.num_pages} needs {plan.pool_bytes:,} bytes, and "
            f"{plan.budget_bytes - plan.fixed_bytes:,} are left of {plan.budget()}: "
            f"{plan.parts()}; at most {plan.fitting_pages} pages fit"
        )
    num_pages = settled.num_pages or _num_pages(settled, plan, device)
    host_bytes = settled.host_kv_bytes
    if config.host_kv_bytes is None:
        host_bytes = min(num_pages * plan.page_bytes, host_bytes or 0)
    return dataclasses.replace(settled, num_pages=num_pages, host_kv_bytes=host_bytes)


def plan_of(
    model: ModelConfig, config: EngineConfig, device: DeviceFacts
) -> MemoryPlan:
    """The memory plan of a resolved config, with temporaries estimated."""
    plan = memory_plan.plan_memory(
        model, config, attention=device.attention, free_bytes=device.free_bytes
    )
    if device.weights_bytes is None:
        return plan
    found = device.weights_bytes + draft_weights_bytes(config)
    return dataclasses.replace(plan, weights_bytes=found)


def check_compiled(
    model: ModelConfig,
    config: EngineConfig,
    device: DeviceFacts,
    memory: Mapping[str, Sequence[int]],
) -> MemoryPlan:
    """The plan of a resolved config with the temporaries of its compiled programs.

    Args:
      model: its shapes.
      config: resolved.
      device: as given to `resolve`.
      memory: temporary and aliased bytes of every program, see Ledger.memory_facts.

    Raises:
      ValueError: it would run out of memory while serving.
    """
    plan = memory_plan.with_compiled(plan_of(model, config, device), memory)
    memory_plan.check_compiled(plan)
    return plan


def nearest(model: ModelConfig, config: EngineConfig, device: DeviceFacts) -> Nearest:
    """The nearest configs that fit, for one that does not."""

    def fits(pages: int, slots: int | None) -> bool:
        changes: dict = {"max_context_len": pages * config.page_size, "num_pages": None}
        if slots is not None:
            changes |= {"num_slots": slots, "decode_batch_sizes": None}
        changed = _settle(model, dataclasses.replace(config, **changes), device)
        plan = plan_of(model, changed, device)
        return plan.fitting_pages >= pages_per_request(changed) + 1

    settled = _settle(model, config, device)
    assert settled.num_slots
    pages = pages_per_request(settled)
    shorter = pages - 1

    def context(slots: int | None) -> int | None:
        found = memory_plan.largest(lambda n: fits(n, slots), 1, shorter)
        return None if found is None else found * config.page_size

    plan = plan_of(model, settled, device)
    return Nearest(
        max_context_len=context(None),
        num_slots=memory_plan.largest(
            lambda slots: fits(pages, slots), 1, settled.num_slots - 1
        ),
        context_of_one_slot=context(1),
        num_devices=-(-plan.weights_bytes // max(1, plan.budget_bytes)),
    )


def _settle(
    model: ModelConfig, config: EngineConfig, device: DeviceFacts
) -> EngineConfig:
    """Everything but the number of pages; of `host_kv_bytes` what it may be at most."""
    on_cpu = device.platform == "cpu"
    context = config.max_context_len or model.context_len
    if context > model.context_len:
        raise ValueError(
            f"max_context_len must be at most the model's context_len "
            f"{model.context_len}, got {context}"
        )
    host_bytes = config.host_kv_bytes
    if host_bytes is None:
        spare = int(device.host_free_bytes * _HOST_FRACTION)
        # Fast mode computes preempted requests again.
        host_bytes = spare if config.numerics == "invariant" else 0
    dtype = default_dtype(device)
    kv_dtype = config.kv_dtype or dtype
    check_kv_skip(config.kv_dtype_skip, kv_dtype, model.num_layers)
    config = dataclasses.replace(
        config,
        max_context_len=context,
        param_dtype=config.param_dtype or dtype,
        kv_dtype=kv_dtype,
        memory_fraction=config.memory_fraction
        or (_CPU_FRACTION if on_cpu else _GPU_FRACTION),
        host_kv_bytes=host_bytes,
    )
    return _resolve_buckets(config, context, on_cpu)


def _resolve_buckets(config: EngineConfig, context: int, on_cpu: bool) -> EngineConfig:
    sizes, slots = config.decode_batch_sizes, config.num_slots
    slots = slots or (sizes[-1] if sizes else (64 if on_cpu else 256))
    if sizes is None:
        # Small ones serve only where the probe finds them in the class of the others,
        # as it does with the CPU's own kernels.
        small = (1,) if on_cpu else ()
        ladder = (*small, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        sizes = (*(size for size in ladder if size < slots), slots)
    shapes = config.prefill_shapes
    if shapes is None:
        # On a CPU 256 tokens a call are as fast a token as more. Padding costs little,
        # since its products are skipped, while each program costs start-up time.
        shapes = (
            ((1, 64), (1, 256), (4, 64)) if on_cpu else ((1, 128), (1, 512), (1, 2048))
        )
        fitting = [shape for shape in shapes if shape[1] < context]
        shapes = tuple(fitting) or shapes[:1]
    return dataclasses.replace(
        config, num_slots=slots, decode_batch_sizes=sizes, prefill_shapes=shapes
    )


def _num_pages(config: EngineConfig, plan: MemoryPlan, device: DeviceFacts) -> int:
    """Pages for all slots, or as many as fit; at least one request's."""
    assert config.num_slots
    per_request = pages_per_request(config)
    least, wanted = per_request + 1, config.num_slots * per_request + 1
    if device.platform == "cpu":
        wanted = min(wanted, max(_CPU_POOL_BYTES // plan.page_bytes, least))
    return min(max(_coarse(plan.fitting_pages), least), wanted)


def _too_small(model: ModelConfig, config: EngineConfig, device: DeviceFacts) -> str:
    """Why one request does not fit beside the weights, and what does."""
    settled = _settle(model, config, device)
    plan, least = plan_of(model, settled, device), pages_per_request(settled) + 1
    pages_bytes = least * plan.page_bytes
    return (
        f"a request of max_context_len {settled.max_context_len} needs {least} pages "
        f"of {plan.page_bytes:,} bytes, and only {plan.fitting_pages} fit: it takes "
        f"{plan.fixed_bytes + pages_bytes:,} of {plan.budget()}: {plan.parts()}, pages "
        f"{pages_bytes:,}; {nearest(model, config, device).text()}"
    )


def _coarse(num_pages: int) -> int:
    """Rounds down by at most a sixteenth; 482 and 483 become 480, 499 becomes 496.

    Compiled programs have the pool's size in their shapes, and the free memory is
    never twice the same: without this hardly a start would find stored programs.
    """
    step = 2 ** max(0, (num_pages // 16).bit_length() - 1)
    return num_pages // step * step
