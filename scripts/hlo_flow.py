"""Follows arrays through an optimized program: who reads one, who copies it.

Also which kernels run, and how often. Knows nothing of models and GPUs.
"""

import dataclasses
from collections.abc import Iterator

from headrace.scripts.hlo_text import Computation, Instruction, Leaf, Module

# Opcodes that start nothing on the device by themselves.
_NO_KERNEL = {
    "add-dependency", "after-all", "bitcast", "call", "conditional", "constant",
    "get-tuple-element", "opt-barrier", "parameter", "partition-id", "replica-id",
    "tuple", "while",
}  # fmt: skip
# They read as much of their first operand as they write.
_PARTIAL = {"gather", "slice", "dynamic-slice"}
# They write some of their first operand, in its place.
_IN_PLACE = {"scatter", "dynamic-update-slice"}
# They make each element of one element of each operand.
_ALIKE = {
    "abs", "add", "and", "bitcast", "compare", "convert", "copy", "divide",
    "exponential", "maximum", "minimum", "multiply", "negate", "power", "rsqrt",
    "select", "subtract", "tanh", "transpose",
}  # fmt: skip
_PRODUCTS = {"dot", "convolution", "custom-call"}

Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """One instruction that reads an array from memory.

    Attributes:
      instruction: the reader.
      source: the array as it lies in memory.
      read_bytes: of the array, once.
      times: that it runs; loops of unknown length count as one turn.
      copies: results that hold as much of the array as was asked for.
    """

    instruction: Instruction
    source: Leaf
    read_bytes: int
    times: int
    copies: tuple[Leaf, ...]

    @property
    def total_bytes(self) -> int:
        """What it reads, and what it writes of copies, all turns together."""
        written = sum(leaf.num_bytes for leaf in self.copies)
        return self.times * (self.read_bytes + written)


@dataclasses.dataclass(frozen=True)
class _Place:
    """An array in a computation: the value of a name, or a part of its tuple."""

    computation: Computation
    name: str
    path: Path
    leaf: Leaf
    times: int
    caller: "_Place | None" = None


def kernels(module: Module) -> Iterator[tuple[Instruction, int]]:
    """What runs on the device, and how often.

    A loop of unknown length counts as one turn; of a conditional, the branch with
    most.
    """
    yield from _kernels_of(module, module.entry, 1)


def _kernels_of(
    module: Module, computation: Computation, times: int
) -> Iterator[tuple[Instruction, int]]:
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = instruction.num_trips or 1
            for role in ("condition", "body"):
                called = module.computations[instruction.called(role)]
                yield from _kernels_of(module, called, times * trips)
        elif opcode == "conditional":
            branches = [
                list(_kernels_of(module, module.computations[name], times))
                for name in instruction.branches
            ]
            yield from max(branches, key=len)
        elif opcode == "call":
            called = module.computations[instruction.called("to_apply")]
            yield from _kernels_of(module, called, times)
        elif opcode not in _NO_KERNEL and not opcode.endswith("-done"):
            yield instruction, times


def uses(module: Module, parameter: Instruction, copy_elements: float) -> list[Use]:
    """Who reads an argument of the program, and who reads copies of it.

    Args:
      module: the program.
      parameter: one of the entry computation.
      copy_elements: a result with as many elements, made of the array without a
        product, is a copy, and is followed like the array itself.
    """
    start = _Place(module.entry, parameter.name, (), parameter.leaves[0], 1)
    seen: set[tuple[str, str, Path]] = set()
    waiting, found = [start], []
    while waiting:
        place = waiting.pop()
        key = (place.computation.name, place.name, place.path)
        if key in seen:
            continue
        seen.add(key)
        for user in place.computation.users[place.name]:
            waiting += _passed_on(module, place, user)
            if user.opcode in _NO_KERNEL or place.path:
                continue
            use, results = _read(module, place, user, copy_elements)
            found.append(use)
            waiting += results
        if place.name == place.computation.root and place.caller is not None:
            caller = place.caller
            waiting.append(
                dataclasses.replace(caller, path=place.path, leaf=place.leaf)
            )
    return found


def _passed_on(module: Module, place: _Place, user: Instruction) -> list[_Place]:
    """Where the same memory appears under another name."""
    here = dataclasses.replace(place, name=user.name)
    positions = [i for i, name in enumerate(user.operands) if name == place.name]
    if user.opcode in ("bitcast", "opt-barrier"):
        return [here]
    if user.opcode == "tuple":
        return [dataclasses.replace(here, path=(i, *place.path)) for i in positions]
    if user.opcode == "get-tuple-element":
        if place.path[:1] != (user.index,):
            return []
        return [dataclasses.replace(here, path=place.path[1:])]
    if user.opcode == "while":
        # What a loop carries keeps its place in the tuple, so the result has it, too.
        called = [user.called("body"), user.called("condition")]
        inside = [(module.computations[name], 0) for name in called]
        times, caller, results = place.times * (user.num_trips or 1), None, [here]
    elif user.opcode == "conditional":
        branches = [module.computations[name] for name in user.branches]
        inside = [(branches[i - 1], 0) for i in positions if i > 0]
        times, caller, results = place.times, here, []
    elif user.opcode == "call":
        called_one = module.computations[user.called("to_apply")]
        inside = [(called_one, i) for i in positions]
        times, caller, results = place.times, here, []
    else:
        return []
    for computation, number in inside:
        name = computation.parameters[number].name
        results.append(_Place(computation, name, place.path, place.leaf, times, caller))
    return results


def _read(
    module: Module, place: _Place, user: Instruction, copy_elements: float
) -> tuple[Use, list[_Place]]:
    """A reader, and the places where what it writes has to be followed."""
    callee = as_callee(module, user)
    positions = [i for i, name in enumerate(user.operands) if name == place.name]
    inner = [callee.parameters[i].name for i in positions if i in callee.parameters]
    read_bytes = max((bytes_read(callee, n, place.leaf) for n in inner), default=0)
    in_place = {
        result for result, target, _ in _in_place(callee) if target in inner
    } | {result for result, operand in user.aliases if operand in positions}
    opcodes = {i.opcode for i in callee.instructions.values()}
    copies = []
    if not opcodes & _PRODUCTS:
        copies = [
            i
            for i, leaf in enumerate(user.leaves)
            if i not in in_place and leaf.num_elements >= copy_elements
        ]
    is_tuple = len(user.leaves) > 1
    followed = [
        dataclasses.replace(
            place,
            name=user.name,
            path=(i,) if is_tuple else (),
            leaf=user.leaves[i],
        )
        for i in (*in_place, *copies)
    ]
    written = tuple(user.leaves[i] for i in copies)
    return Use(user, place.leaf, read_bytes, place.times, written), followed


def as_callee(module: Module, user: Instruction) -> Computation:
    """What a fusion does; a lone instruction as the fusion that it could be."""
    callee = module.computations.get(user.called("calls"))
    if user.opcode == "fusion" and callee is not None:
        return callee
    operands = user.operands
    parameters = {
        name: Instruction(name, "parameter", (), str(i), "")
        for i, name in reversed(list(enumerate(operands)))
    }
    return Computation(user.name, parameters | {user.name: user}, user.name)


def _through_bitcasts(callee: Computation, name: str) -> str:
    """The name of the value that a chain of bitcasts begins with."""
    while callee.instructions[name].opcode == "bitcast":
        name = callee.instructions[name].operands[0]
    return name


def bytes_read(callee: Computation, name: str, leaf: Leaf) -> int:
    """Bytes of a fusion's argument that it reads."""
    total = 0
    for user in callee.users[name]:
        if user.opcode == "bitcast":
            total += bytes_read(callee, user.name, leaf)
        elif user.opcode in _PARTIAL and user.operands[0] == name:
            part = user.leaves[0]
            wanted = _wanted(callee)[user.name]
            total += part.num_bytes * wanted // max(part.num_elements, 1)
        elif user.opcode not in _IN_PLACE or user.operands[0] != name:
            total = leaf.num_bytes
        if total >= leaf.num_bytes:
            return leaf.num_bytes
    return total


def _wanted(callee: Computation) -> dict[str, int]:
    """Elements of each value that a fusion computes: what a later slice leaves of it.

    Only followed through what makes one element of one, and through slices.
    """
    wanted = dict.fromkeys(callee.instructions, 0)
    wanted[callee.root] = callee.instructions[callee.root].leaves[0].num_elements
    for instruction in reversed(callee.instructions.values()):
        if instruction.opcode == "parameter":
            continue
        size = sum(leaf.num_elements for leaf in instruction.leaves)
        for place, name in enumerate(dict.fromkeys(instruction.operands)):
            whole = sum(x.num_elements for x in callee.instructions[name].leaves)
            is_sliced = instruction.opcode in _PARTIAL and place == 0
            is_alike = whole == size and instruction.opcode in _ALIKE
            more = wanted[instruction.name] if is_sliced or is_alike else whole
            wanted[name] = min(whole, wanted[name] + more)
    return wanted


def written_in_place(callee: Computation) -> dict[int, int]:
    """Number of a result that changes an argument's memory -> bytes of the changes."""
    return {result: written.num_bytes for result, _, written in _in_place(callee)}


def _in_place(callee: Computation) -> Iterator[tuple[int, str, Leaf]]:
    """Number of a result, the parameter whose memory it changes, the changes."""
    root = callee.instructions[callee.root]
    results = root.operands if root.opcode == "tuple" else (root.name,)
    for number, name in enumerate(results):
        writer = callee.instructions[_through_bitcasts(callee, name)]
        if writer.opcode in _IN_PLACE:
            target = _through_bitcasts(callee, writer.operands[0])
            change = writer.operands[-1 if writer.opcode == "scatter" else 1]
            yield number, target, callee.instructions[change].leaves[0]
