"""Reads the text of an optimized XLA program: computations, instructions, shapes.

Only what the compile gate asks for. Knows nothing of models and GPUs.
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


class Leaf(NamedTuple):
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the dimensions."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Size in memory; four-bit numbers take half a byte."""
        return self.num_elements * self.bits // 8

    @property
    def bits(self) -> int:
        """Of one element."""
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(found[1]) if found else 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without its percent sign.
      opcode: such as "fusion".
      leaves: the arrays of the result, in order; those of nested tuples flat.
      arguments: the text between the opcode's parentheses.
      attributes: the text after them.
    """

    name: str
    opcode: str
    leaves: tuple[Leaf, ...]
    arguments: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads."""
        return tuple(_NAME.findall(self.arguments))

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the source's scopes it comes from; empty where XLA added it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self._plain_attributes)
        return found[1].replace("\\'", "'") if found else ""

    @functools.cached_property
    def target(self) -> str:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self._plain_attributes)
        return found[1] if found else ""

    @functools.cached_property
    def kernel_hash(self) -> str:
        """Tells Mosaic kernels of one name apart; empty where jax writes none."""
        found = re.search(r'kernel_hash = "((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        """Sizes of what one block of threads makes of the result; () is unknown."""
        found = re.search(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]', self.attributes)
        return tuple(map(int, re.findall(r"\d+", found[1]))) if found else ()

    @functools.cached_property
    def num_trips(self) -> int | None:
        """Turns of a `while`; None where only the data tell."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @functools.cached_property
    def index(self) -> int:
        """Which part a `get-tuple-element` takes, which argument a `parameter` is."""
        if self.opcode == "parameter":
            return int(self.arguments)
        found = re.search(r"\bindex=(\d+)", self._plain_attributes)
        return int(found[1]) if found else 0

    @functools.cached_property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(result, operand) pairs of a custom call that share their memory."""
        found = re.search(
            r"output_to_operand_aliasing=\{((?:[^{}]|\{\d*\})*)\}",
            self._plain_attributes,
        )
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", found[1] if found else "")
        return tuple((int(result or 0), int(operand)) for result, operand in pairs)

    def called(self, role: str) -> str:
        """The computation that it calls as "calls", "body", "condition", "to_apply"."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self._plain_attributes)
        return found[1] if found else ""

    @functools.cached_property
    def branches(self) -> tuple[str, ...]:
        """The computations of a `conditional`, in the order of its later operands."""
        if found := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            return tuple(_NAME.findall(found[1]))
        roles = ("true_computation", "false_computation")
        return tuple(name for role in roles if (name := self.called(role)))

    @functools.cached_property
    def _plain_attributes(self) -> str:
        # What follows may be a kernel's byte code, in which anything can stand.
        return self.attributes.split("backend_config=")[0]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program: its instructions by name, the last read `root`."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Name -> the instructions that read it."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Argument number -> instruction."""
        every = self.instructions.values()
        return {i.index: i for i in every if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: Computation

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        """Those of all computations."""
        return [
            instruction
            for computation in self.computations.values()
            for instruction in computation.instructions.values()
        ]


def parse_module(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, root, instructions = header[2], "", {}
            entry = name if header[1] else entry
        elif line == "}" and name:
            computations[name] = Computation(name, instructions, root)
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            instruction = parse_instruction(found[2], found[3])
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
    if entry not in computations:
        raise ValueError("no entry computation in the text of the program")
    return Module(computations, computations[entry])


def parse_instruction(name: str, text: str) -> Instruction:
    """Reads what stands after `%name = `."""
    text = re.sub(r"/\*index=\d+\*/", "", text)
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    leaves = (
        Leaf(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(shape)
    )
    return Instruction(
        name=name,
        opcode=rest[:opening],
        leaves=tuple(leaves),
        arguments=rest[opening + 1 : closing - 1],
        attributes=rest[closing:],
    )


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"no end of {text[start : start + 60]!r}")
