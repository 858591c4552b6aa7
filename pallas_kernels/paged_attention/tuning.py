"""Which shapes the Mosaic kernels serve, and their block sizes, as data. No jax.

No card has timed any of them: chosen so that ptxas spills nothing, and by bytes in
flight. `scripts/gpu_selfcheck.py` is for measuring.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

# wgmma exists here and nowhere else: other GPUs take plain XLA.
CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64)
# Query rows of one kv head, by head dim: wgmma's narrow side.
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


def max_decode_rows(head_dim: int, *, is_narrow: bool, has_cap: bool) -> int:
    """Query rows that the decode kernel takes, as far as nothing spills.

    Args:
      head_dim: of HEAD_DIMS.
      is_narrow: pools have 8 bits.
      has_cap: scores have a soft cap.
    """
    rows = MAX_DECODE_ROWS[head_dim] // (2 if has_cap and head_dim > 64 else 1)
    return rows // 2 if is_narrow and head_dim == 256 else rows


def is_decode(
    num_tokens: int, group: int, head_dim: int, *, is_narrow: bool, has_cap: bool
) -> bool:
    """Whether the decode kernel serves so many query tokens of so many heads."""
    most = max_decode_rows(head_dim, is_narrow=is_narrow, has_cap=has_cap)
    return num_tokens <= MAX_DECODE_TOKENS and num_tokens * group <= most


def refusal(
    q_BTKGH: Any,
    pools: tuple[Any, Any],
    arrays: Any,
    options: Any,
    capability: tuple[int, int],
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
    is_narrow, has_cap = pools[0].dtype.itemsize == 1, options.soft_cap is not None
    if not is_decode(T, G, H, is_narrow=is_narrow, has_cap=has_cap):
        if arrays.tree_mask_BT is not None:
            return f"a tree of {T} nodes with {G} heads a group"
        if is_narrow:
            return f"chunks over {dtype} pools"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShape:
    """Arguments of the API for which ptxas makes other code; see `api`."""

    num_tokens: int
    group: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_tree: bool = False

    def __str__(self) -> str:
        extras = [
            f"{name}" for name in ("window", "soft_cap", "has_sinks", "has_tree")
            if getattr(self, name)
        ]  # fmt: skip
        sizes = f"T{self.num_tokens} G{self.group} H{self.head_dim} C{self.page_size}"
        return " ".join([sizes, self.dtype, *extras])


def tuned_shapes() -> Iterator[KernelShape]:
    """Shapes that stand for all that the kernels serve.

    Every width of the decode kernel's products, every page size and type of pool; the
    options all at once, since each of them costs registers.
    """
    every = {"window": 300, "has_sinks": True}
    for H in HEAD_DIMS:
        for T, G in ((1, 4), (4, 4), (8, 4), (8, 8)):
            for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
                yield from _decode_shapes(T, G, H, dtype, every)
        for C in PAGE_SIZES:
            for more in ({}, every | {"soft_cap": 30.0}):
                yield KernelShape(
                    num_tokens=512, group=4, head_dim=H, page_size=C, **more
                )


def _decode_shapes(
    num_tokens: int, group: int, head_dim: int, dtype: str, every: dict[str, Any]
) -> Iterator[KernelShape]:
    is_narrow = dtype != "bfloat16"
    shapes = [{"page_size": C} for C in PAGE_SIZES if C >= 32 or not is_narrow]
    shapes += [every | {"page_size": 32, "soft_cap": 30.0}]
    shapes += [every | {"page_size": 32, "has_tree": True}]
    for shape in shapes:
        has_cap = "soft_cap" in shape
        if is_decode(num_tokens, group, head_dim, is_narrow=is_narrow, has_cap=has_cap):
            yield KernelShape(
                num_tokens=num_tokens, group=group, head_dim=head_dim, dtype=dtype,
                **shape,
            )  # fmt: skip
