"""Launches and host waits of a step, by the cheapest and by the dearest branches."""

from __future__ import annotations

import dataclasses

from bench.compiled.hlo import Instruction
from bench.gpu.thunks import BRANCH, CONTROL, GRAPH, LOOP, Thunk

Range = tuple[int, int]
"""The least and the most."""


@dataclasses.dataclass(frozen=True)
class Costs:
    launches: Range = (0, 0)  # kernels, library calls and copies
    waits: Range = (0, 0)  # reads of a predicate, for which the host waits until the device is done

    def __add__(self, other: Costs) -> Costs:
        return Costs(_add(self.launches, other.launches), _add(self.waits, other.waits))

    def times(self, turns: Range) -> Costs:
        return Costs(_multiply(self.launches, turns), _multiply(self.waits, turns))


def _add(x: Range, y: Range) -> Range:
    return x[0] + y[0], x[1] + y[1]


def _multiply(x: Range, y: Range) -> Range:
    return x[0] * y[0], x[1] * y[1]


@dataclasses.dataclass(frozen=True)
class Counting:
    """Counts below a thunk."""

    program: dict[str, Instruction]
    most_turns: int  # assumed of loops whose number of turns depends on data

    def all(self, thunks: list[Thunk], captured: bool) -> Costs:
        return sum((self.one(thunk, captured) for thunk in thunks), Costs())

    def one(self, thunk: Thunk, captured: bool) -> Costs:
        captured = captured or thunk.kind == GRAPH
        parts = {name: self.all(part, captured) for name, part in thunk.parts.items()}
        if thunk.kind == BRANCH:
            return self._branches(list(parts.values()), captured)
        if thunk.kind == LOOP:
            return self._loop(thunk, parts, captured)
        own = thunk.kind not in CONTROL
        return sum(parts.values(), Costs((own, own)))

    def _branches(self, parts: list[Costs], captured: bool) -> Costs:
        parts = _with_empty(parts)
        launches = min(p.launches[0] for p in parts), max(p.launches[1] for p in parts)
        waits = min(p.waits[0] for p in parts), max(p.waits[1] for p in parts)
        return Costs(launches, _add(waits, (not captured, not captured)))

    def _loop(self, thunk: Thunk, parts: dict[str, Costs], captured: bool) -> Costs:
        turns, known = self.turns(thunk)
        costs = parts.get("body", Costs()).times(turns)
        if known and not captured:
            return costs
        tests = _add(turns, (1, 1))
        waits = Costs(waits=(0, 0) if captured else tests)
        return costs + parts.get("condition", Costs()).times(tests) + waits

    def turns(self, thunk: Thunk) -> tuple[Range, bool]:
        """The fewest and the most turns, and whether XLA knows them."""
        known = self.program[thunk.instruction].trips
        if known is not None:
            return (known, known), True
        # Without a condition to compute, as of `apply_if`, it turns once at most.
        return (0, self.most_turns if "condition" in thunk.parts else 1), False

    def describe(self, thunk: Thunk, captured: bool) -> str:
        """Of a loop or a branch of the step: "0-1 x 353 verify"."""
        name = _place(self.program[thunk.instruction].op_name)
        parts = {label: self.all(part, captured) for label, part in thunk.parts.items()}
        if thunk.kind == LOOP:
            return f"{shown(self.turns(thunk)[0])} x {shown(parts['body'].launches)} {name}"
        branches = _with_empty([*parts.values()])
        return f"{' or '.join(shown(branch.launches) for branch in branches)} {name}"


def _with_empty(branches: list[Costs]) -> list[Costs]:
    """With a branch of no thunks, which XLA does not write."""
    return branches if len(branches) > 1 else [*branches, Costs()]


def shown(pair: Range) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def _place(path: str) -> str:
    """The part of a path that says where in a step it is."""
    general = ("while", "body", "cond", "closed_call", "jit(_run)")
    names = [n for n in path.split("/") if n not in general]
    kept = "/".join(n for n in names if not n.startswith(("branch", "jit(")))[:40]
    return kept or path.split("/")[-1]
