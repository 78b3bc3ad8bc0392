"""A parser of the optimised program that XLA prints (`compiled.as_text()`).

Only what counting needs: computations, instructions, shapes with their layout and memory space, and
the computations that an instruction calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # others hold their number of bits in their name
_SHAPE = re.compile(
    r"(?P<type>[a-z]+[0-9]*[a-z0-9]*)\[(?P<sizes>[0-9,<=]*)\](?:\{(?P<layout>[^}]*)\})?"
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = ")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|condition|body|branch_computations|true_computation|false_computation)="
    r"\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)\}?"
)
_OPERAND = re.compile(r"%([\w.\-]+)")
VMEM = 1
"""The memory space of on-chip memory in a layout, `S(1)`.  Space 0 is the device's main memory."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array as it lies in memory."""

    dtype: str
    sizes: tuple[int, ...]
    order: tuple[int, ...]  # of the axes, from the one that changes fastest
    tile: tuple[int, ...]  # of the last axes in that order; they are padded to multiples of it
    space: int

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes with the padding of tiles."""
        sizes = [self.sizes[axis] for axis in reversed(self.order)]
        for place, tile in zip(range(len(sizes) - 1, -1, -1), reversed(self.tile), strict=False):
            sizes[place] = -(-sizes[place] // tile) * tile
        return math.prod(sizes) * _bits(self.dtype) // 8

    @property
    def itemsize(self) -> int:
        return _bits(self.dtype) // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+([0-9]+)", dtype)
    if found is None:
        raise ValueError(f"an unknown element type in the program: {dtype}")
    return int(found[1])


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # of the result; several for a tuple, flattened
    operands: tuple[str, ...]
    calls: tuple[str, ...]  # computations
    line: str
    is_root: bool

    @property
    def op_name(self) -> str:
        """The path of names under which JAX traced it, "" if XLA made it."""
        return self._text(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")

    @property
    def index(self) -> int:
        """Of a get-tuple-element."""
        return int(self._text(r"index=(\d+)"))

    @property
    def number(self) -> int:
        """Of a parameter."""
        return int(self._text(r"parameter\((\d+)\)"))

    @property
    def trips(self) -> int | None:
        """Turns of a while loop; None if they depend on data."""
        count = self._text(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(count) if count else None

    def _text(self, pattern: str) -> str:
        found = re.search(pattern, self.line)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = (i for i in self.instructions if i.opcode == "parameter")
        return tuple(sorted(found, key=lambda i: i.number))

    @functools.cached_property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)

    @functools.cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        users: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return {name: tuple(them) for name, them in users.items()}


@dataclasses.dataclass(frozen=True)
class Program:
    entry: Computation
    computations: dict[str, Computation]

    def executed(
        self, start: Computation | None = None
    ) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction that runs by itself: of loops, branches and calls, not of fusions."""
        computation = self.entry if start is None else start
        for instruction in computation.instructions:
            yield computation, instruction
            if instruction.opcode in ("while", "conditional", "call"):
                for name in instruction.calls:
                    yield from self.executed(self.computations[name])


def parse(text: str) -> Program:
    """The program that `compiled.as_text()` prints.

    Raises:
      ValueError: it is not a program of this form.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            if begins := _COMPUTATION.match(line):
                name, lines = begins["name"], []
                entry = name if begins["entry"] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(map(_instruction, lines)))
            name = None
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("this is no optimised program: it has no ENTRY computation")
    return Program(computations[entry], computations)


def _instruction(line: str) -> Instruction:
    begins = _INSTRUCTION.match(line)
    if begins is None:
        raise ValueError(f"not an instruction: {line[:200]}")
    rest = line[begins.end() :]
    end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    shapes = tuple(map(_shape, _SHAPE.finditer(rest[:end])))
    opcode, _, after = rest[end:].lstrip().partition("(")
    close = _closing(f"({after}", 0)
    inside = "" if opcode in ("parameter", "constant") else after[: close - 1]
    calls = [
        name for group in _CALLS.findall(after[close - 1 :]) for name in _OPERAND.findall(group)
    ]
    return Instruction(
        begins["name"],
        opcode,
        shapes,
        tuple(_OPERAND.findall(inside)),
        tuple(calls),
        line,
        begins["root"] is not None,
    )


def _closing(text: str, start: int) -> int:
    """The place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    raise ValueError(f"an open parenthesis: {text[start : start + 100]}")


def _shape(found: re.Match[str]) -> Shape:
    sizes = tuple(int(size.lstrip("<=")) for size in found["sizes"].split(",") if size)
    layout = found["layout"] or ""
    order, _, tiles = layout.partition(":")
    axes = tuple(int(axis) for axis in order.split(",") if axis)
    if len(axes) != len(sizes):
        axes = tuple(reversed(range(len(sizes))))
    tile = re.search(r"T\(([0-9,]+)\)", tiles)
    space = re.search(r"S\((\d+)\)", tiles)
    return Shape(
        found["type"],
        sizes,
        axes,
        tuple(map(int, tile[1].split(","))) if tile else (),
        int(space[1]) if space else 0,
    )
