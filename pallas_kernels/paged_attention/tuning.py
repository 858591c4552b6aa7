"""Which shapes the Mosaic kernels serve, and their block sizes, as data. No jax.

No card has timed any of them: chosen so that ptxas spills nothing, and by bytes in
flight. `scripts/gpu_selfcheck.py` is for measuring.
"""

import dataclasses
from typing import Any

# wgmma exists here and nowhere else: other GPUs take plain XLA.
CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
# Query rows of one kv head, by head dim: wgmma's narrow side, as far as nothing spills.
MAX_DECODE_ROWS = {64: 64, 128: 64, 256: 32}
MAX_DECODE_TOKENS = 8
# Keys of one split: fixed, so that no bit depends on the batch.
SPLIT = 512
# Keys of one tile.
TILE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeTuning:
    """Sizes of the decode kernel.

    Attributes:
      stages: tiles of keys, and of values, in flight.
      split: keys that one program handles.
    """

    stages: int
    split: int = SPLIT


def decode_tuning(head_dim: int) -> DecodeTuning:
    """Sizes that compile without spills at all page sizes and types of pools."""
    return DecodeTuning(stages={64: 4, 128: 3, 256: 2}[head_dim])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillTuning:
    """Block sizes and registers; the results' last bits depend on them.

    Attributes:
      keys: per tile of the ring, a multiple of 64.
      stages: tiles in the ring.
      columns: of the output that one product adds; fewer take fewer registers.
      registers: per thread, of the producer and of a consumer.
      weights_in_registers: softmax weights go from registers into the product with the
        values, and all columns at once. Not interpretable.
    """

    keys: int = 64
    stages: int = 2
    columns: int = 64
    registers: tuple[int, int] = (56, 224)
    weights_in_registers: bool = False


def prefill_tuning(head_dim: int) -> PrefillTuning:
    """Sizes that compile without spills at all page sizes."""
    return {
        64: PrefillTuning(keys=128, stages=3),
        128: PrefillTuning(keys=128, columns=128),
        256: PrefillTuning(columns=256, weights_in_registers=True),
    }[head_dim]


def is_decode(num_tokens: int, group: int, head_dim: int) -> bool:
    """Whether the decode kernel serves so many query tokens of so many heads."""
    rows = num_tokens * group
    return num_tokens <= MAX_DECODE_TOKENS and rows <= MAX_DECODE_ROWS[head_dim]


def refusal(
    q_BTKGH: Any, pools: tuple[Any, Any], arrays: Any, capability: tuple[int, int]
) -> str | None:
    """Why the kernels do not serve these arguments of the API, or None."""
    _, T, _, G, H = q_BTKGH.shape
    C, dtype = pools[0].shape[3], pools[0].dtype.name
    if capability != CAPABILITY:
        return f"compute capability {capability}, not {CAPABILITY}"
    if q_BTKGH.dtype.name != "bfloat16":
        return f"queries of {q_BTKGH.dtype.name}, not bfloat16"
    if dtype not in ("bfloat16", "int8", "float8_e4m3fn"):
        return f"pools of {dtype}"
    if H not in HEAD_DIMS or C not in PAGE_SIZES:
        return f"head_dim {H} (of {HEAD_DIMS}), pages of {C} (of {PAGE_SIZES})"
    if not is_decode(T, G, H):
        if arrays.tree_mask_BT is not None:
            return f"a tree of {T} nodes with {G} heads a group"
        if pools[0].dtype.itemsize == 1:
            return f"chunks over {dtype} pools"
    return None
