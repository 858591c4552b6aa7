"""Counts the bytes that an optimized program moves between memory and its kernels.

Knows nothing of models and GPUs. Caches are left out: what one kernel writes and the
next one reads counts twice, also where it fits into the L2.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from headrace.scripts.hlo_flow import as_callee, bytes_read, kernels, written_in_place
from headrace.scripts.hlo_text import Computation, Instruction, Leaf, Module


class Traffic(NamedTuple):
    """Bytes that kernels read from memory, and that they write."""

    read: int
    written: int


def traffic(
    module: Module, *, elsewhere: Iterable[Leaf] = (), resident: int = 0
) -> Traffic:
    """What all kernels of a run read and write.

    An operand counts once per kernel, of a gathered one what is gathered, and a weight
    once for each pass (see `weight_passes`); of an array changed in place the changes.
    Loops whose length only the data tell count as one turn.

    Args:
      module: the program.
      elsewhere: arrays that count nothing where a custom call reads them, since only
        its own code tells how much.
      resident: see `weight_passes`.
    """
    skipped = set(elsewhere)
    owner = {
        id(instruction): computation
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    read = written = 0
    for instruction, times in kernels(module):
        callee = as_callee(module, instruction)
        passes = weight_passes(instruction, resident)
        around = owner[id(instruction)]
        read += times * _read_bytes(callee, around, instruction, skipped, passes)
        written += times * _written_bytes(callee, instruction)
    return Traffic(read, written)


def _read_bytes(
    callee: Computation,
    computation: Computation,
    kernel: Instruction,
    skipped: set[Leaf],
    passes: int,
) -> int:
    is_custom = kernel.opcode == "custom-call"
    total = 0
    for name in dict.fromkeys(kernel.operands):
        leaves = computation.instructions[name].leaves
        if len(leaves) != 1 or (is_custom and leaves[0] in skipped):
            continue
        places = [i for i, operand in enumerate(kernel.operands) if operand == name]
        inner = [callee.parameters[i].name for i in places if i in callee.parameters]
        read = max((bytes_read(callee, n, leaves[0]) for n in inner), default=0)
        # The rows of a product pass through the caches, a weight is larger than they.
        total += read * (passes if _is_weight(kernel, leaves[0]) else 1)
    return total


def _written_bytes(callee: Computation, kernel: Instruction) -> int:
    changed = written_in_place(callee) | {i: 0 for i, _ in kernel.aliases}
    return sum(changed.get(i, x.num_bytes) for i, x in enumerate(kernel.leaves))


def _is_weight(kernel: Instruction, leaf: Leaf) -> bool:
    return bool(kernel.tiles) and leaf.num_elements > kernel.leaves[0].num_elements


def weight_passes(kernel: Instruction, resident: int = 0) -> int:
    """How often a product of rows and a weight reads the weight: its tiles of rows.

    Args:
      kernel: one with an output of [rows, columns], or with partial sums in front of
        them; others, and those without tiles, count as one pass.
      resident: tiles that a GPU works on at a time. Where that is all of them, those
        with the same columns find each other's weights in the L2: one pass.
    """
    if not kernel.tiles or "gemm" not in kernel.name:
        return 1
    counts = [
        -(-size // tile)
        for size, tile in zip(kernel.leaves[0].dims, kernel.tiles, strict=True)
    ]
    # A weight has more columns than a step has rows.
    rows = min(zip(kernel.leaves[0].dims[-2:], counts[-2:], strict=True))[1]
    return 1 if math.prod(counts) <= resident else rows


def most_passes(module: Module, resident: int = 0) -> int:
    """The largest `weight_passes` of the program."""
    passes = (weight_passes(kernel, resident) for kernel, _ in kernels(module))
    return max(passes, default=1)
