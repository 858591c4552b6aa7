"""What must not be in a compiled step: each rule is a function of text and numbers.

A rule returns its faults, none where all is well. No jax, no compiler.
"""

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.scripts.gpu_compile import PtxasKernel
from headrace.scripts.hlo_flow import kernels, uses
from headrace.scripts.hlo_text import Instruction, Module
from headrace.scripts.hlo_traffic import weight_passes

MAX_KERNELS_PER_LAYER = 14
MAX_TRAFFIC = 1.05
MAX_READS = 1.1
MAX_ARGUMENT_ERROR = 0.05

# A sort as wide as this is one of the vocabulary.
_WIDE = 1024
_SORTING_TARGET = re.compile(r"[Ss]ort|[Tt]op_?[Kk]")
_LAYER = re.compile(r"\blayer_(\d+)\b")
_THUNK = re.compile(r"^\d+: k(\w+)", re.MULTILINE)
_SLOW = re.compile(r"Potential Performance Loss: (.*)")


class Fault(NamedTuple):
    """Something that must not be: what, how much of it, and how much may be."""

    what: str
    value: float | str
    limit: float | str = 0

    def line(self, program: str) -> str:
        """For people."""
        return f"FAIL {program}: {self.what}: {self.value}, limit {self.limit}"


def spills(kernels_seen: Iterable[PtxasKernel]) -> list[Fault]:
    """No kernel keeps registers in memory."""
    return [
        Fault(f"bytes that {kernel.name} spills", kernel.spill_bytes)
        for kernel in kernels_seen
        if kernel.spill_bytes
    ]


def serialized(log: str) -> list[Fault]:
    """Ptxas must not put waits between wgmma instructions."""
    return [
        Fault("ptxas: potential performance loss", said) for said in _SLOW.findall(log)
    ]


def mosaic_kernels(module: Module) -> dict[str, list[Instruction]]:
    """The calls of Mosaic kernels, by the kernel's name."""
    calls: dict[str, list[Instruction]] = {}
    for instruction in module.instructions:
        if instruction.target.startswith("mosaic_gpu"):
            scopes = instruction.op_name.split("/")
            calls.setdefault(scopes[max(0, len(scopes) - 2)], []).append(instruction)
    return calls


def without_registers(
    calls: Mapping[str, Sequence[Instruction]], kernels_seen: Iterable[PtxasKernel]
) -> list[Fault]:
    """Ptxas has printed a register line for each kernel; else nobody saw its spills.

    Args:
      calls: see `mosaic_kernels`, of every program that the process has compiled.
      kernels_seen: what ptxas printed in all that time.
    """
    lines = collections.Counter(kernel.name for kernel in kernels_seen)
    wanted = {name: len({i.kernel_hash for i in calls[name]}) for name in calls}
    return [
        Fault(f"register lines of {name}", lines[name], f"at least {count}")
        for name, count in wanted.items()
        if lines[name] < count
    ]


def missing_kernels(
    counts: Iterable[Mapping[str, int]], expected: Iterable[str], num_layers: int
) -> list[Fault]:
    """One of the programs calls the kernel in each layer: no fallback in silence.

    Args:
      counts: of each program, kernel name -> calls.
      expected: kernel names.
      num_layers: of the model.
    """
    counts = list(counts)
    most = {name: max((c.get(name, 0) for c in counts), default=0) for name in expected}
    return [
        Fault(f"calls of {name}", most[name], f"at least {num_layers}")
        for name in most
        if most[name] < num_layers
    ]


def large_temporary(temp_bytes: int, limits: Mapping[str, int]) -> list[Fault]:
    """The temporary memory is smaller than any of the things named in `limits`."""
    return [
        Fault(f"temporary bytes, as large as {what}", temp_bytes, limit)
        for what, limit in limits.items()
        if temp_bytes >= limit
    ]


def small_alias(alias_bytes: int, donated_bytes: int) -> list[Fault]:
    """KV pool and logits are changed in place."""
    if alias_bytes >= donated_bytes:
        return []
    what = "bytes of KV pool and logits that results reuse"
    return [Fault(what, alias_bytes, f"at least {donated_bytes}")]


def program_arguments(module: Module, name: str) -> list[Instruction]:
    """The arrays of one argument of the program, such as "params"."""
    parameters = module.entry.parameters.values()
    return [p for p in parameters if re.match(rf"{name}\b", p.op_name)]


def bytes_read(module: Module, argument: str) -> int:
    """Bytes of an argument, "params" say, that a run reads.

    An array counts once per reader; its copies are read and written, too.
    """
    return sum(
        use.total_bytes
        for array in program_arguments(module, argument)
        for use in uses(module, array, _copy_elements(array))
    )


def _copy_elements(array: Instruction) -> float:
    # A quarter of a weight in memory is as bad: half of a packed one, say. Scales of
    # norms, and of outputs, are small, and multiply something larger.
    leaf = array.leaves[0]
    is_scale = len(leaf.dims) < 2 or leaf.dims[-1] == 1
    return math.inf if is_scale else leaf.num_elements / 4


def weight_copies(module: Module) -> list[Fault]:
    """No weight lies in memory a second time: not copied, not dequantized."""
    faults = []
    for weight in program_arguments(module, "params"):
        for use in uses(module, weight, _copy_elements(weight)):
            for copy in use.copies:
                is_same = copy.dtype == weight.leaves[0].dtype
                kind = "copied" if is_same else f"in memory as {copy.dtype}"
                what = f"bytes of {weight.op_name} {kind} by {use.instruction.name}"
                faults.append(Fault(what, copy.num_bytes))
    return list(dict.fromkeys(faults))


def wide_weights(module: Module) -> list[Fault]:
    """No array in memory has as many numbers as a quantized weight, in more bits.

    Looks at sizes alone, where `weight_copies` follows the arrays.
    """
    packed = {
        weight.leaves[0].num_elements: weight.op_name
        for weight in program_arguments(module, "params")
        if weight.leaves[0].bits <= 8
    }
    return [
        Fault(f"bytes as large as {packed[leaf.num_elements]} made wide: {kernel.name}",
              leaf.num_bytes)
        for kernel, _ in kernels(module)
        for leaf in kernel.leaves
        if leaf.bits > 8 and leaf.num_elements in packed
    ]  # fmt: skip


def odd_arguments(argument_bytes: int, other_bytes: int, wanted: int) -> list[Fault]:
    """Weights take the memory that their scheme says.

    Args:
      argument_bytes: of the program.
      other_bytes: of its arguments that are no weights.
      wanted: of the weights.
    """
    found = argument_bytes - other_bytes
    if abs(found - wanted) <= MAX_ARGUMENT_ERROR * wanted:
        return []
    return [Fault("bytes of weights among the arguments", found, f"near {wanted}")]


def lost_arguments(module: Module, numbers: Mapping[str, int]) -> list[Fault]:
    """All arrays of these arguments are in the program, or nothing is known of copies.

    Args:
      module: the program.
      numbers: argument -> its arrays.
    """
    found = {name: len(program_arguments(module, name)) for name in numbers}
    return [
        Fault(f"arrays of {name} in the program", found[name], f"exactly {number}")
        for name, number in numbers.items()
        if found[name] != number
    ]


def kv_copies(module: Module, live_elements: int) -> list[Fault]:
    """Neither a pool nor all live pages of a layer are gathered or copied.

    Args:
      module: the program.
      live_elements: numbers in the live keys of one layer.
    """
    faults = []
    for pool in program_arguments(module, "kv_cache"):
        for use in uses(module, pool, live_elements):
            for copy in use.copies:
                what = f"bytes of {pool.op_name} copied by {use.instruction.name}"
                faults.append(Fault(what, copy.num_bytes))
    return list(dict.fromkeys(faults))


def host_returns(thunks: str) -> list[Fault]:
    """The host starts a step once: all of it is one command buffer, loops included.

    Elsewhere it waits for the condition in every turn of a loop.

    Args:
      thunks: XLA's dump of them.
    """
    outside = _THUNK.findall(thunks)
    if outside == ["CommandBuffer"]:
        return []
    return [Fault("starts by the host", ", ".join(outside) or "none seen", "1 graph")]


def wide_sorts(module: Module) -> list[Fault]:
    """Nothing sorts something as wide as a vocabulary."""
    faults = []
    for i in module.instructions:
        sizes = [size for leaf in i.leaves for size in leaf.dims]
        is_wide = i.opcode == "sort" and max(sizes, default=0) >= _WIDE
        if is_wide or _SORTING_TARGET.search(i.target):
            faults.append(Fault(f"sorts of the vocabulary: {i.name}", 1))
    return faults


def kernels_per_layer(module: Module, num_layers: int) -> int:
    """Kernels that a run starts in each layer.

    What the first layer does for all of them does not count, nor do a few kernels of
    which XLA does not say where they come from; one per layer of these does.
    """
    of_layer: collections.Counter[int] = collections.Counter()
    num_nameless = 0
    for instruction, times in kernels(module):
        if found := _LAYER.search(instruction.op_name):
            of_layer[int(found[1])] += times
        num_nameless += 0 if instruction.op_name else times
    layers = range(1 if num_layers > 1 else 0, num_layers)
    return max(of_layer[layer] for layer in layers) + num_nameless // num_layers


def many_kernels(per_layer: int, limit: int = MAX_KERNELS_PER_LAYER) -> list[Fault]:
    """A layer of a decode step is few kernels, since each start takes time."""
    if per_layer <= limit:
        return []
    return [Fault("kernels per layer", per_layer, limit)]


def heavy_traffic(
    moved_bytes: int, floor_bytes: int, limit: float = MAX_TRAFFIC
) -> list[Fault]:
    """Weights and live KV once are nearly all that a decode step moves."""
    ratio = moved_bytes / floor_bytes
    if ratio <= limit:
        return []
    return [Fault("bytes moved over the floor", round(ratio, 3), limit)]


def heavy_reads(
    read_bytes: int, floor_bytes: int, limit: float = MAX_READS
) -> list[Fault]:
    """Packed weights and live KV once are nearly all that a decode step reads."""
    ratio = read_bytes / floor_bytes
    if ratio <= limit:
        return []
    return [Fault("bytes read over the floor", round(ratio, 3), limit)]


def repeated_weights(module: Module, resident: int) -> list[Fault]:
    """A product of few rows reads its weight once; see `hlo_traffic.weight_passes`."""
    faults = []
    for kernel, _ in kernels(module):
        if (passes := weight_passes(kernel, resident)) > 1:
            faults.append(Fault(f"times {kernel.name} reads its weight", passes, 1))
    return faults
