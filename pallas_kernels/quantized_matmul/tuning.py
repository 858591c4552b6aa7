"""Which products the Mosaic kernel serves, and its block sizes, as data. No jax.

No card has timed any of them: chosen so that ptxas spills nothing, by bytes in flight
and by what each multiprocessor draws from the L2. `scripts/gpu_selfcheck.py` is for
measuring.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

# wgmma exists here and nowhere else: other GPUs take plain XLA.
CAPABILITY = (9, 0)
# Inputs of one tile.
TILE = 128
GROUP_SIZES = (32, 64, 128)
# Rows up to which a role's scales multiply sums.
MOST_ROWS_OF_SUMS = 64
# Programs that keep all multiprocessors of an H100 or H200 busy.
_ENOUGH = 128
_LEAST_TILES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Block sizes; a result's last bits depend on `on_sums`, `splits` and `chains`.

    Those three must follow from the weight and the role; the rest may follow the rows.

    Attributes:
      on_sums: scales multiply a group's sums; else they multiply the weights.
      splits: programs that share the inputs of an output.
      chains: warpgroups of a program that share them: tile i is of chain i % chains.
      rows: of one program, a multiple of 8.
      outputs: of one warpgroup, a multiple of 64.
      consumers: warpgroups side by side along the outputs.
      stages: tiles in the ring, a multiple of `chains`.
      registers: per thread, of the producer and of a consumer; None leaves them even.
    """

    on_sums: bool
    splits: int
    chains: int
    rows: int
    outputs: int
    consumers: int
    stages: int
    registers: tuple[int, int] | None = None

    @property
    def program_outputs(self) -> int:
        """Outputs of one program."""
        return self.outputs * self.consumers


def tuning(outputs: int, inputs: int, *, rows: int, most_rows: int) -> Tuning:
    """Sizes for a weight; what bits depend on does not follow from `rows`.

    Args:
      outputs, inputs: of the weight.
      rows: of this product.
      most_rows: of any product of its role.
    """
    if most_rows <= MOST_ROWS_OF_SUMS:
        splits = _splits(inputs, outputs // 128)
        width = min(-(-rows // 8) * 8, MOST_ROWS_OF_SUMS)
        few = width <= 16
        return Tuning(
            on_sums=True, splits=splits, chains=2, rows=width, outputs=64,
            consumers=1 if few else 2, stages=8 if few else 4,
            registers=None if few else (40, 112),
        )  # fmt: skip
    programs = -(-most_rows // 128) * (outputs // 256)
    return Tuning(
        on_sums=False, splits=_splits(inputs, programs), chains=1,
        rows=min(-(-rows // 8) * 8, 128), outputs=128,
        consumers=2 if outputs % 256 == 0 else 1, stages=3, registers=(40, 232),
    )  # fmt: skip


def _splits(inputs: int, programs: int) -> int:
    """Parts of the inputs that make enough programs, each of some tiles."""
    splits, tiles = 1, inputs // TILE
    while (
        programs * splits < _ENOUGH
        and tiles % (2 * splits) == 0
        and tiles // (2 * splits) >= _LEAST_TILES
    ):
        splits *= 2
    return splits


def refusal(
    values: Any, scales: Any, zeros: Any, x: Any, capability: tuple[int, int]
) -> str | None:
    """Why the kernel does not serve these arguments of the API, or None."""
    outputs, inputs = values.shape
    group = inputs // scales.shape[1]
    if capability != CAPABILITY:
        return f"compute capability {capability}, not {CAPABILITY}"
    if x.dtype.name != "bfloat16":
        return f"rows of {x.dtype.name}, not bfloat16"
    if values.dtype.name not in ("int4", "int8", "float8_e4m3fn"):
        return f"weights of {values.dtype.name}"
    if group not in GROUP_SIZES:
        return f"groups of {group}, not one of {GROUP_SIZES}"
    if outputs % 128 or inputs % (2 * TILE):
        return f"a weight of {outputs} x {inputs}, not multiples of 128 and {2 * TILE}"
    return None
