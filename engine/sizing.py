"""Chooses the sizes that a config leaves open, from the model and the free memory.

Pure arithmetic on the host: the same numbers come out for a named GPU on a machine
that has none. Everything is allocated at start, so what does not fit is refused here.
"""

import dataclasses

from headrace.configs.schema import Dtype, EngineConfig, ModelConfig

_BYTES = {"float32": 4, "bfloat16": 2}
# On a CPU the pool shares its memory with the user's programs, and is filled with
# zeros at start: half a second a gigabyte.
_CPU_FRACTION, _CPU_POOL_BYTES = 0.5, 2 * 2**30
_GPU_FRACTION = 0.88
_HOST_FRACTION = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What sizing needs to know of the device.

    Attributes:
      platform: "cpu" or "gpu".
      free_bytes: memory that is free before weights are loaded.
      host_free_bytes: the host's, where that is not the device's own.
    """

    platform: str
    free_bytes: int
    host_free_bytes: int = 0


def default_dtype(device: DeviceFacts) -> Dtype:
    """Storage type of weights and KV pages where the config leaves it open.

    A CPU without bfloat16 arithmetic reads bfloat16 weights twenty times slower.
    """
    return "float32" if device.platform == "cpu" else "bfloat16"


def num_params(model: ModelConfig) -> int:
    """Parameters of the model, tied ones counted once."""
    D, F, H = model.model_dim, model.ffw_dim, model.head_dim
    qkv = (model.num_heads + 2 * model.num_kv_heads) * H * D
    layer = qkv + D * model.num_heads * H + 3 * F * D + 2 * D
    tables = (1 if model.tie_embeddings else 2) * model.vocab_size * D
    return model.num_layers * layer + tables + D


def page_bytes(model: ModelConfig, page_size: int, kv_dtype: str) -> int:
    """Bytes of one page, keys and values of all layers."""
    token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return token * page_size * _BYTES[kv_dtype]


def resolve(
    model: ModelConfig, config: EngineConfig, device: DeviceFacts
) -> EngineConfig:
    """Returns the config with every None replaced.

    Raises:
      ValueError: the context is longer than the model's, or weights and one request
        do not fit into the memory.
    """
    on_cpu = device.platform == "cpu"
    context = config.max_context_len or model.context_len
    if context > model.context_len:
        raise ValueError(
            f"max_context_len must be at most the model's context_len "
            f"{model.context_len}, got {context}"
        )
    dtype = default_dtype(device)
    config = dataclasses.replace(
        config,
        max_context_len=context,
        param_dtype=config.param_dtype or dtype,
        kv_dtype=config.kv_dtype or dtype,
        memory_fraction=config.memory_fraction
        or (_CPU_FRACTION if on_cpu else _GPU_FRACTION),
    )
    config = _resolve_buckets(config, context, on_cpu)
    num_pages = _num_pages(model, config, device)
    assert config.kv_dtype
    host_bytes = config.host_kv_bytes
    if host_bytes is None:
        pool_bytes = num_pages * page_bytes(model, config.page_size, config.kv_dtype)
        spare = int(device.host_free_bytes * _HOST_FRACTION)
        # Fast mode computes preempted requests again.
        host_bytes = min(pool_bytes, spare) if config.numerics == "invariant" else 0
    return dataclasses.replace(config, num_pages=num_pages, host_kv_bytes=host_bytes)


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


def _num_pages(model: ModelConfig, config: EngineConfig, device: DeviceFacts) -> int:
    assert config.kv_dtype and config.param_dtype and config.memory_fraction
    assert config.max_context_len and config.num_slots
    size = page_bytes(model, config.page_size, config.kv_dtype)
    weights = num_params(model) * _BYTES[config.param_dtype]
    # Logits, counts and biases per slot, and as much again while sampling.
    logits = config.num_slots * model.vocab_size * 4
    budget = int(device.free_bytes * config.memory_fraction) - weights - 5 * logits
    if config.num_pages is not None:
        if config.num_pages * size > budget:
            raise ValueError(
                f"num_pages {config.num_pages} needs {config.num_pages * size:,} "
                f"bytes; {budget:,} are left of memory_fraction "
                f"{config.memory_fraction} of {device.free_bytes:,} free bytes after "
                f"{weights:,} of weights"
            )
        return config.num_pages
    per_request = -(-config.max_context_len // config.page_size)
    fitting, least = budget // size, per_request + 1
    if fitting < least:
        raise ValueError(
            f"a request of max_context_len {config.max_context_len} needs "
            f"{least} pages of {size:,} bytes, and only {max(0, fitting)} fit "
            f"beside {weights:,} bytes of weights in memory_fraction "
            f"{config.memory_fraction} of {device.free_bytes:,} free bytes; lower "
            f"max_context_len or raise memory_fraction"
        )
    wanted = config.num_slots * per_request + 1
    if device.platform == "cpu":
        wanted = min(wanted, max(_CPU_POOL_BYTES // size, least))
    return min(max(_coarse(fitting), least), wanted)


def _coarse(num_pages: int) -> int:
    """Rounds down by at most a sixteenth; 482 and 483 become 480, 499 becomes 496.

    Compiled programs have the pool's size in their shapes, and the free memory is
    never twice the same: without this hardly a start would find stored programs.
    """
    step = 2 ** max(0, (num_pages // 16).bit_length() - 1)
    return num_pages // step * step
