"""Bytes that one turn of a compiled loop moves between main memory and the chip, by kind.

They are counted from the instructions of the optimised program.  An instruction reads its operands
and writes its results, unless they lie in on-chip memory.  A slice reads only itself, and an update
in place writes only what is new.  XLA's own estimates know none of these three.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator

from bench.compiled.hlo import Computation, Instruction, Program, Shape

KINDS = (
    "weights", "cache_read", "cache_written", "cache_copied", "states", "logits", "collectives",
    "other",
)  # fmt: skip
"""`cache_written` are new tokens, `cache_copied` is all else that is written to a cache, `states`
is what is read of and written to states of recurrent layers, and `logits` is what is outside the
models: logits, noise, sampling and verification."""

FEWER_DRAFTS = "fewer_drafts"
"""The scope of passes for steps with fewer drafts, which run instead of the widest one."""

BLOCKS = "blocks"
"""The scope of loops over the filled blocks of a long cache."""

FILTERS = "filters"
"""The scope of top-k, top-p and min-p, whose first branch does nothing.  It is the one counted."""

PHASES = ("propose", "verify", "commit")
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
HOST = ("infeed", "outfeed", "send", "recv")

_FREE = {
    "get-tuple-element", "tuple", "bitcast", "parameter", "constant", "copy-start", "slice-start",
    "while", "conditional", "call", "after-all", "opt-barrier", "optimization-barrier",
    "partition-id", "async-start", "async-update",
}  # fmt: skip
_SAME_VALUE = {
    "bitcast", "copy", "copy-start", "copy-done", "slice-start", "slice-done", "reshape",
    "transpose", "convert", "slice", "dynamic-update-slice", "scatter", "opt-barrier",
    "optimization-barrier", "all-gather", "all-gather-start", "all-gather-done", "async-start",
    "async-done", "call-start", "call-done",  # a v7x lays arrays anew on its sparse cores
}  # fmt: skip
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written
_CACHE = re.compile(r"\.(keys|values)\[\d+\]$")
_STATE = re.compile(r"\.states\[\d+\]\.(state|columns\[\d+\])$")
_MODEL = re.compile(r"params\.(\w+)")
_PAIRS = re.compile(r"/pairs_(\d+)/")
"""The scope of a product with experts, and how many pairs of a token and an expert it computes."""

Origin = str | None
"""The path of the argument whose value it is: `params.target['head']['kernel']`."""

_Origins = dict[tuple[str, str], tuple[Origin, ...]]


@dataclasses.dataclass
class Traffic:
    """Of one turn of the loop, on each device."""

    bytes: Counter[str] = dataclasses.field(default_factory=Counter)  # by kind
    by_phase: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    collectives: Counter[tuple[str, int]] = dataclasses.field(default_factory=Counter)
    """(kind, bytes of a result) -> how many."""
    copies: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """Writes of a whole weight or of more of a cache than is new: (path of the argument, bytes).

    Those of every branch and loop are here, whether or not its bytes are counted."""
    evictions: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """The same for what was brought to on-chip memory, changed there, and written back."""
    weights: Counter[str] = dataclasses.field(default_factory=Counter)
    """Bytes by the model: "target" or "proposer"."""

    def add(self, kind: str, phase: str, size: int) -> None:
        if size:
            self.bytes[kind] += size
            self.by_phase.setdefault(phase, Counter())[kind] += size

    def update(self, other: Traffic, times: int = 1) -> None:
        self.copies += other.copies
        if not times:
            return
        for phase, counted in other.by_phase.items():
            for kind, size in counted.items():
                self.add(kind, phase, size * times)
        for key, count in other.collectives.items():
            self.collectives[key] += count * times
        for model, size in other.weights.items():
            self.weights[model] += size * times
        self.evictions += other.evictions

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def traffic(program: Program, vocab_sizes: tuple[int, ...], blocks: int = 1) -> Traffic:
    """The traffic of one turn of the program's outermost loop.

    Args:
      program: of `Decoder.run`.
      vocab_sizes: arrays with an axis of one of these sizes are logits.  (Parts of them, on a mesh,
        are to be named too.)
      blocks: of a long cache that attention reads, in the scope `blocks`.

    Raises:
      ValueError: the program has no loop.
    """
    loops = [i for i in program.entry.instructions if i.opcode == "while"]
    if not loops:
        raise ValueError("the program has no loop")
    body = max((_body(program, loop) for loop in loops), key=lambda it: len(it.instructions))
    return _Counter(program, frozenset(vocab_sizes), blocks).of(body)


def host_transfers(program: Program) -> list[str]:
    """The names of the instructions that wait for the host."""
    return [
        instruction.name
        for _, instruction in program.executed()
        if instruction.opcode.removesuffix("-start").removesuffix("-done") in HOST
    ]


def _body(program: Program, loop: Instruction) -> Computation:
    found = re.search(r"body=%([\w.\-]+)", loop.line)
    assert found is not None  # of every while loop
    return program.computations[found[1]]


class _Counter:
    def __init__(self, program: Program, vocab_sizes: frozenset[int], blocks: int) -> None:
        self.program = program
        self.turns = {FEWER_DRAFTS: 0, BLOCKS: blocks}
        self.vocab_sizes = vocab_sizes
        self.origins: _Origins = {}
        self.caches, self.states = (
            {
                (i.shapes[0].dtype, i.shapes[0].sizes)
                for i in program.entry.parameters
                if kind.search(i.op_name)
            }
            for kind in (_CACHE, _STATE)
        )
        self._trace(program.entry, [(i.op_name,) for i in program.entry.parameters])

    def of(self, computation: Computation) -> Traffic:
        counted = Traffic()
        for instruction in computation.instructions:
            self._count(computation, instruction, counted)
        return counted

    def _count(self, within: Computation, instruction: Instruction, counted: Traffic) -> None:
        opcode, scopes = instruction.opcode, instruction.op_name.split("/")
        phase = next((name for name in PHASES if name in scopes), "other")
        if opcode == "while":
            known = [turns for scope, turns in self.turns.items() if scopes[-2:-1] == [scope]]
            turns = known[0] if known else instruction.trips or 1
            counted.update(self.of(_body(self.program, instruction)), turns)
        elif opcode == "conditional":
            branches = [self.of(self.program.computations[name]) for name in instruction.calls]
            kept = branches[:1] if FILTERS in scopes else branches
            dearest = max(kept, key=lambda branch: branch.total)
            for branch in branches:
                counted.update(branch, 1 if branch is dearest else 0)
        elif opcode == "call":
            counted.update(self.of(self.program.computations[instruction.calls[0]]))
        elif (name := opcode.removesuffix("-start")) in COLLECTIVES:
            sizes = [shape.bytes for shape in instruction.shapes if shape.sizes]
            size = max(sizes, default=0)
            counted.collectives[name, size] += 1
            counted.add("collectives", phase, size)
        elif not _is_free(instruction):
            self._count_moves(within, instruction, phase, counted)

    def _count_moves(
        self, within: Computation, instruction: Instruction, phase: str, counted: Traffic
    ) -> None:
        reads, writes = self._reads(within, instruction), self._writes(within, instruction)
        labels = self.origins.get((within.name, instruction.name), (None,) * len(writes))
        for number, (shape, size, in_place) in enumerate(writes):
            origin = labels[number] if number < len(labels) else None
            kind = self._kind(origin, shape, instruction)
            if kind == "cache_read":
                kind = "cache_written" if in_place else "cache_copied"
            if kind in ("weights", "cache_copied") and size:
                leaves = _leaves_the_chip(within, instruction)
                written = counted.evictions if leaves else counted.copies
                written.append((origin or instruction.name, size))
            counted.add(kind, phase, size)
        for shape, size, origin in reads:
            kind = self._kind(origin, shape, instruction)
            if kind == "weights" and origin is not None:
                counted.weights[_found(_MODEL, origin)] += size
            counted.add(kind, phase, size)

    def _kind(self, origin: Origin, shape: Shape, instruction: Instruction) -> str:
        if origin and origin.startswith("params"):
            return "weights"
        if (origin and _CACHE.search(origin)) or (shape.dtype, shape.sizes) in self.caches:
            return "cache_read"
        if (origin and _STATE.search(origin)) or (shape.dtype, shape.sizes) in self.states:
            return "states"
        if self.vocab_sizes.intersection(shape.sizes):
            return "logits"
        return "other" if "Transformer" in instruction.op_name else "logits"

    def _reads(
        self, within: Computation, instruction: Instruction
    ) -> Iterator[tuple[Shape, int, Origin]]:
        """Of each operand in main memory: its shape, the bytes that are read, and its origin."""
        operands = instruction.operands
        if instruction.opcode in ("copy-done", "slice-done"):
            start = within.by_name[operands[0]]
            source, made = within.by_name[start.operands[0]], instruction.shapes[0]
            if source.shapes[0].space == 0:
                yield source.shapes[0], made.bytes, self._origin(within, source.name)
            return
        for place, name in enumerate(operands):
            operand = within.by_name[name]
            if len(operand.shapes) != 1 or operand.shapes[0].space != 0:
                continue
            (shape,) = operand.shapes
            size = shape.bytes
            if instruction.opcode == "fusion":
                fused = self.program.computations[instruction.calls[0]]
                size = self._used(fused, fused.parameters[place])
            elif instruction.opcode in _UPDATES and place == 0:
                size = 0
            elif instruction.opcode in _SLICES and place == 0:
                size = instruction.shapes[0].bytes
            elif len(shape.sizes) == 3 and _is_grouped(instruction):
                # A stack of experts, of which each pair reads one at most.
                pairs = int(_found(_PAIRS, instruction.op_name))
                size = size // shape.sizes[0] * min(pairs, shape.sizes[0])
            yield shape, size, self._origin(within, name)

    def _used(self, within: Computation, value: Instruction) -> int:
        """The bytes of a value inside a fusion that the fusion reads."""
        size = 0
        for user in within.users[value.name]:
            if user.opcode == "bitcast" or (
                user.opcode in _UPDATES and user.operands[0] == value.name
            ):
                size += self._used(within, user)
            elif user.opcode in _SLICES and user.operands[0] == value.name:
                size += user.shapes[0].bytes
            elif user.opcode == "fusion":
                inner = self.program.computations[user.calls[0]]
                for place, name in enumerate(user.operands):
                    if name == value.name:
                        size += self._used(inner, inner.parameters[place])
                if _is_bitcast(inner):
                    size += self._used(within, user)
            elif user.opcode != "tuple":
                return value.shapes[0].bytes
        return min(size, value.shapes[0].bytes)

    def _writes(
        self, within: Computation, instruction: Instruction
    ) -> list[tuple[Shape, int, bool]]:
        """Of each result: its shape, the bytes written to main memory, and whether in place."""
        made = [
            (shape, shape.bytes if update is None else update, update is not None)
            for shape, update in zip(
                instruction.shapes, self._updates(within, instruction), strict=True
            )
        ]
        return [(shape, size if shape.space == 0 else 0, placed) for shape, size, placed in made]

    def _updates(self, within: Computation, value: Instruction) -> list[int | None]:
        """Of each result: the bytes of an update in place, or None if all of it is written."""
        if value.opcode == "tuple":
            parts = (self._updates(within, within.by_name[name]) for name in value.operands)
            return [size for part in parts for size in part]
        if value.opcode == "bitcast":
            return self._updates(within, within.by_name[value.operands[0]])
        if value.opcode == "fusion":
            inner = self.program.computations[value.calls[0]]
            updates = [i for i in inner.instructions if i.opcode in _UPDATES]
            if len(inner.root.shapes) == 1 and len(updates) > 1:  # a chain of updates
                sizes = (self._updates(inner, update)[0] or 0 for update in updates)
                return [None if self._updates(inner, inner.root) == [None] else sum(sizes)]
            return self._updates(inner, inner.root)
        if value.opcode not in _UPDATES:
            aliased = _aliased(value)
            return [0 if n in aliased else None for n in range(len(value.shapes))]
        update = within.by_name[value.operands[_UPDATES[value.opcode]]].shapes[0]
        size = math.prod(update.sizes) * update.itemsize
        return [size]

    def _origin(self, within: Computation, name: str) -> Origin:
        labels = self.origins.get((within.name, name), (None,))
        return labels[0] if len(labels) == 1 else None

    def _trace(self, within: Computation, arguments: list[tuple[Origin, ...]]) -> None:
        """Note the origin of every value of a computation and of those that it runs."""

        def of(name: str) -> tuple[Origin, ...]:
            return self.origins.get((within.name, name), (None,))

        for value in within.instructions:
            nothing: tuple[Origin, ...] = (None,) * max(len(value.shapes), 1)
            made = nothing
            if value.opcode == "parameter":
                made = arguments[value.number]
            elif value.opcode == "get-tuple-element":
                whole = of(value.operands[0])
                made = (whole[value.index] if value.index < len(whole) else None,)
            elif value.opcode == "tuple":
                made = tuple(origin for name in value.operands for origin in of(name))
            elif value.opcode in _SAME_VALUE or _joins_slices(value):
                made = of(value.operands[0])[:1]
            elif aliased := _aliased(value):
                names = map(aliased.get, range(len(value.shapes)))
                made = tuple(None if n is None else of(value.operands[n])[0] for n in names)
            elif value.opcode == "fusion":
                inner = self.program.computations[value.calls[0]]
                made = self._through(inner, inner.root, [of(name) for name in value.operands])
            elif value.opcode == "while":
                made = of(value.operands[0])
                self._trace(_body(self.program, value), [made])
            elif value.opcode == "conditional":
                for name, operand in zip(value.calls, value.operands[1:], strict=True):
                    self._trace(self.program.computations[name], [of(operand)])
            elif value.opcode == "call":
                inner = self.program.computations[value.calls[0]]
                self._trace(inner, [of(name) for name in value.operands])
                made = self.origins.get((inner.name, inner.root.name), nothing)
            self.origins[within.name, value.name] = made

    def _through(
        self, within: Computation, value: Instruction, arguments: list[tuple[Origin, ...]]
    ) -> tuple[Origin, ...]:
        """The origins of a value inside a fusion with the given origins of its operands."""
        if value.opcode == "parameter":
            return arguments[value.number]
        if value.opcode == "tuple":
            parts = (within.by_name[name] for name in value.operands)
            return tuple(self._through(within, part, arguments)[0] for part in parts)
        if value.opcode == "fusion":
            inner = self.program.computations[value.calls[0]]
            operands = (within.by_name[name] for name in value.operands)
            given = [self._through(within, operand, arguments) for operand in operands]
            return self._through(inner, inner.root, given)
        if value.opcode in _SAME_VALUE:
            return self._through(within, within.by_name[value.operands[0]], arguments)
        return (None,) * max(len(value.shapes), 1)


def _aliased(value: Instruction) -> dict[int, int]:
    """Of a kernel: result -> the operand in which it is written.

    Such kernels write new tokens to a cache, of which the program does not say how many they are.
    """
    if value.opcode != "custom-call":
        return {}
    found = re.search(r"output_to_operand_aliasing={(.*?\))}", value.line)
    pairs = re.findall(r"{(\d*)}: \((\d+), {}", found[1] if found else "")
    return {int(result or 0): int(operand) for result, operand in pairs}


def _is_bitcast(fused: Computation) -> bool:
    return all(i.opcode in ("parameter", "bitcast") for i in fused.instructions)


def _joins_slices(instruction: Instruction) -> bool:
    """Slices that were brought to on-chip memory beside one another, and are now read as one."""
    return instruction.opcode == "custom-call" and '"ConcatBitcast"' in instruction.line


def _is_free(instruction: Instruction) -> bool:
    ended = instruction.opcode.removesuffix("-done")
    return instruction.opcode in _FREE or ended in COLLECTIVES or _joins_slices(instruction)


def _found(pattern: re.Pattern[str], text: str) -> str:
    """Returns the first group of a pattern that the text has."""
    found = pattern.search(text)
    assert found is not None
    return found[1]


def _is_grouped(instruction: Instruction) -> bool:
    """Returns whether it is a kernel that reads the chosen experts: a TPU's, or ours for a GPU."""
    return instruction.opcode == "custom-call" and (
        "ragged_dot_tiling" in instruction.line or "/few_experts/" in instruction.op_name
    )


def _leaves_the_chip(within: Computation, instruction: Instruction) -> bool:
    if instruction.opcode != "copy-done":
        return False
    start = within.by_name[instruction.operands[0]]
    return within.by_name[start.operands[0]].shapes[0].space != 0
