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
SMALL_GROUPS = (32, 64)
# Rows up to which a role's scales multiply sums: registers hold two sums of each.
MOST_ROWS_OF_SUMS = 64
# Rows of one program where they multiply the weights.
ROWS_OF_WEIGHTS = 128
# Programs that keep all multiprocessors of an H100 or H200 busy.
_ENOUGH = 128
_LEAST_TILES = 4
# Shared memory of a program, and where two of them share a multiprocessor.
_SMEM_BYTES, _HALF_SMEM_BYTES = 227 * 1024, 113 * 1024
_MOST_STAGES = 8


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


def tuning(
    outputs: int, inputs: int, *, rows: int, most_rows: int, bits: int
) -> Tuning:
    """Sizes for a weight; what a result's bits depend on does not follow `rows`.

    Few outputs a program draw the rows from the L2 again and again, many leave
    multiprocessors idle or need splits, whose sums pass through memory. So chains share
    the inputs of a program as well.

    Args:
      outputs, inputs: of the weight.
      rows: of this product.
      most_rows: of any product of its role.
      bits: of a stored number.
    """
    padded = -(-rows // 8) * 8
    if most_rows <= MOST_ROWS_OF_SUMS:
        is_few = padded <= 16
        sizes = Tuning(
            on_sums=True,
            splits=_splits(inputs, outputs // 128),
            chains=2,
            rows=min(padded, MOST_ROWS_OF_SUMS),
            outputs=64,
            consumers=1 if is_few else 2,
            stages=_MOST_STAGES,
            registers=None if is_few else (40, 112),
        )
        return _fitted(sizes, bits, _HALF_SMEM_BYTES if is_few else _SMEM_BYTES)
    blocks = -(-most_rows // ROWS_OF_WEIGHTS)
    sizes = Tuning(
        on_sums=False,
        splits=_splits(inputs, blocks * (outputs // 256)),
        chains=1,
        rows=min(padded, ROWS_OF_WEIGHTS),
        outputs=128,
        consumers=1 if outputs % 256 else 2,
        stages=_MOST_STAGES,
        registers=(40, 232),
    )
    return _fitted(sizes, bits, _SMEM_BYTES)


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


def _fitted(sizes: Tuning, bits: int, most_bytes: int) -> Tuning:
    """As many stages as shared memory holds."""
    t = sizes
    stage = t.program_outputs * TILE * bits // 8 + t.rows * TILE * 2
    fixed = t.chains * t.program_outputs * TILE * 2
    fixed += (t.chains - 1) * t.program_outputs * t.rows * 4
    fixed += 1024  # barriers, and what aligning takes
    stages = (most_bytes - fixed) // stage // t.chains * t.chains
    return dataclasses.replace(t, stages=min(stages, t.stages))


def refusal(
    values: Any, scales: Any, x: Any, capability: tuple[int, int]
) -> str | None:
    """Why the kernel does not serve these arguments of the API, or None."""
    outputs, inputs = values.shape
    group = inputs // scales.shape[1]
    if capability != CAPABILITY:
        return f"compute capability {capability}, not {CAPABILITY}"
    if x.dtype.name != "bfloat16":
        return f"rows of {x.dtype.name}, not bfloat16"
    if group not in SMALL_GROUPS and group % TILE:
        return f"groups of {group}, neither in {SMALL_GROUPS} nor a multiple of {TILE}"
    if outputs % 128 or inputs % TILE:
        return f"a weight of {outputs} x {inputs}, not of multiples of 128"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelShape:
    """Arguments of the API for which ptxas makes other code; see `api`."""

    outputs: int
    inputs: int
    rows: int
    most_rows: int
    group: int
    dtype: str = "int4"
    has_zeros: bool = False

    def __str__(self) -> str:
        zeros = " zeros" if self.has_zeros else ""
        return (
            f"{self.dtype} {self.outputs}x{self.inputs} g{self.group}{zeros} "
            f"R{self.rows} of {self.most_rows}"
        )


def tuned_shapes() -> Iterator[KernelShape]:
    """Shapes that stand for all that the kernel serves.

    The weights of Llama 3.1 8B at every width of a program, and every type, group and
    kind of zero points at the widest, which takes the most registers.
    """
    weights = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    rows = ((1, 64), (16, 64), (32, 64), (64, 64), (8, 512), (128, 512), (512, 512))
    for R, most in rows:
        for outputs, inputs in weights:
            yield KernelShape(
                outputs=outputs, inputs=inputs, rows=R, most_rows=most, group=128
            )
    for R, most in ((8, 64), (64, 64), (128, 512)):
        for group in (32, 64, 128):
            for dtype in ("int4", "int8", "float8_e4m3fn"):
                for has_zeros in (False, True):
                    if has_zeros and dtype == "float8_e4m3fn":
                        continue
                    yield KernelShape(
                        outputs=4096, inputs=14336, rows=R, most_rows=most,
                        group=group, dtype=dtype, has_zeros=has_zeros,
                    )  # fmt: skip
    # An odd number of 128 outputs, and one scale per output.
    yield KernelShape(outputs=640, inputs=4096, rows=128, most_rows=512, group=128)
    for R, most in ((8, 64), (64, 64), (128, 512)):
        yield KernelShape(
            outputs=4096, inputs=14336, rows=R, most_rows=most, group=14336,
            dtype="int8",
        )  # fmt: skip
