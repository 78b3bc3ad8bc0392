"""Scores, weights and sums of one block of slots, for attention.

Their order depends only on the number of a slot in its block, whether a query is computed with
others or by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT32, Emitter, Value, word, zeros
from specjax.kernels.forms import Machine
from specjax.kernels.functions import exponential, tangent

BLOCK = 64
"""Slots whose keys stay in the L1 cache while all queries pass."""

TOGETHER = 2
"""Queries for which a key or a value is read from the L1 cache once."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The addresses of the rows of each query, in float32.

    Attributes:
      scaled: the query times the scale, `padded` numbers.
      mixed: the sums of weighted values so far, `padded` numbers.
      weights: of the slots of the block.
      most: the greatest score so far.
      total: the sum of weights so far.
      keep: the factor of the sums before the block.
    """

    scaled: Value
    mixed: Value
    weights: Value
    most: Value
    total: Value
    keep: Value


class Mixing:
    """Writes the instructions for a block, whose rows have `padded` numbers."""

    def __init__(
        self, emit: Emitter, machine: Machine, padded: int, softcap: Value | None, memory: Memory
    ) -> None:
        self.emit, self.b, self.lanes = emit, emit.b, machine.lanes
        self.padded, self.softcap, self.memory = padded, softcap, memory
        self.vector: Any = ir.VectorType(FLOAT, self.lanes)
        # Vectors that are added up at once, for each of the queries together.
        self._most = machine.registers // 4

    def score(self, keys: Value, row: Value, many: int) -> None:
        """Computes the products of a block's keys and `many` queries, in the memory of weights."""
        b, emit, lanes = self.b, self.emit, self.lanes
        rows = [b.add(row, word(r)) for r in range(many)]
        queries = [b.gep(self.memory.scaled, [b.mul(r, word(self.padded))]) for r in rows]
        weights = [b.gep(self.memory.weights, [b.mul(r, word(BLOCK))]) for r in rows]
        at_once = min(lanes, self._most)
        with emit.loop(word(0), word(BLOCK), lanes) as (i, _, _):
            block = b.gep(keys, [b.mul(i, word(self.padded))])
            scores: list[list[Value]] = [[] for _ in rows]
            for first in range(0, lanes, at_once):
                empty = [zeros(self.vector)] * (many * at_once)
                with emit.loop(word(0), word(self.padded), lanes, empty) as (d, sums, added):
                    numbers = [emit.read(query, d, self.vector, 4) for query in queries]
                    for j in range(at_once):
                        at = b.add(d, word((first + j) * self.padded))
                        key = emit.read(block, at, self.vector, 4)
                        for r, query in enumerate(numbers):
                            c = r * at_once + j
                            added[c] = emit.multiply_add(key, query, sums[c])
                for r, score in enumerate(scores):
                    score.append(emit.sums(sums[r * at_once : (r + 1) * at_once]))
            for score, place in zip(scores, weights, strict=True):
                emit.write(emit.sums(score), place, i, 4)

    def pass_over(self, row: Value) -> None:
        """Skips a block that a query does not see."""
        weights = self.b.gep(self.memory.weights, [self.b.mul(row, word(BLOCK))])
        with self.emit.loop(word(0), word(BLOCK), self.lanes) as (i, _, _):
            self.emit.write(zeros(self.vector), weights, i, 4)
        self.emit.write(ir.Constant(FLOAT, 1.0), self.memory.keep, row, 4)

    def weigh(self, seen: Value, row: Value) -> None:
        """Computes weights from the scores of a block, and the factor of a query's sums so far.

        Args:
          seen: a byte for each slot, 0 where the query does not see it.
          row: the query.
        """
        b, emit, lanes = self.b, self.emit, self.lanes
        weights = b.gep(self.memory.weights, [b.mul(row, word(BLOCK))])
        hidden = emit.constant(float("-inf"), lanes)

        def visible(i: Value) -> Value:
            some = ir.VectorType(INT8, lanes)
            return b.icmp_unsigned("!=", emit.read(seen, i, some, 1), zeros(some))

        with emit.loop(word(0), word(BLOCK), lanes, [hidden]) as (i, (best,), following):
            score = self._capped(emit.read(weights, i, self.vector, 4))
            score = b.select(visible(i), score, hidden)
            emit.write(score, weights, i, 4)
            following[0] = emit.larger(score, best)
        most = emit.read(self.memory.most, row, FLOAT, 4)
        halves = best
        while (count := halves.type.count) > 1:
            half = count // 2
            halves = emit.larger(
                emit.lanes(halves, range(half)), emit.lanes(halves, range(half, count))
            )
        higher = emit.larger(b.extract_element(halves, ir.Constant(INT32, 0)), most)
        subtracted = emit.splat(higher, lanes)
        shrink = exponential(emit, b.fsub(emit.splat(most, lanes), subtracted))
        keep = b.extract_element(shrink, ir.Constant(INT32, 0))
        with emit.loop(word(0), word(BLOCK), lanes, [zeros(self.vector)]) as (i, now, following):
            score = emit.read(weights, i, self.vector, 4)
            weight = exponential(emit, b.fsub(score, subtracted))
            weight = b.select(visible(i), weight, zeros(self.vector))
            emit.write(weight, weights, i, 4)
            following[0] = b.fadd(now[0], weight)
        total = emit.read(self.memory.total, row, FLOAT, 4)
        emit.write(emit.multiply_add(total, keep, emit.sum(now[0])), self.memory.total, row, 4)
        emit.write(higher, self.memory.most, row, 4)
        emit.write(keep, self.memory.keep, row, 4)

    def _capped(self, score: Value) -> Value:
        if self.softcap is None:
            return score
        b = self.b
        cap = self.emit.splat(self.softcap, self.lanes)
        return b.fmul(cap, tangent(self.emit, b.fdiv(score, cap)))

    def mix(self, values: Value, row: Value, many: int) -> None:
        """Adds the weighted values of a block to the sums of `many` queries.

        The values of several queries together are multiplied by 0 where one of them sees a slot and
        another does not.  If that makes a sum NaN, each query is computed by itself, without unseen
        values.
        """
        b, emit = self.b, self.emit
        rows = [b.add(row, word(r)) for r in range(many)]
        vectors = self.padded // self.lanes
        for first in range(0, vectors, self._most):
            count = min(self._most, vectors - first)

            def alone(row: Value, first: int = first, count: int = count) -> None:
                (sums,) = self._sums(values, [row], first, count)
                self._keep(row, first, sums)

            if many == 1:
                alone(row)
                continue
            sums = self._sums(values, rows, first, count)
            every = emit.sum(functools.reduce(b.fadd, [x for of_row in sums for x in of_row]))
            with b.if_else(b.fcmp_unordered("uno", every, every)) as (spoilt, sound):
                with spoilt, emit.loop(row, b.add(row, word(many)), 1) as (each, _, _):
                    alone(each)
                with sound:
                    for each, of_row in zip(rows, sums, strict=True):
                        self._keep(each, first, of_row)

    def _sums(self, values: Value, rows: list[Value], first: int, count: int) -> list[list[Value]]:
        """Returns by query the sums of weighted values of a block, in `count` vectors from `first`.

        Slots take turns among a few sums, which are added at the end, so that an addition need not
        wait for the one before.  A single query reads zeros in place of the slots that it does not
        see.
        """
        b, emit, lanes = self.b, self.emit, self.lanes
        nothing = self._zeros()
        weights = [b.gep(self.memory.weights, [b.mul(row, word(BLOCK))]) for row in rows]
        turns = 2 ** ((self._most // count).bit_length() - 1)
        empty = [zeros(self.vector)] * (len(rows) * turns * count)
        with emit.loop(word(0), word(BLOCK), turns, empty) as (s, now, following):
            for turn in range(turns):
                slot = b.add(s, word(turn))
                at = b.add(b.mul(slot, word(self.padded)), word(first * lanes))
                place = b.gep(values, [at])
                each = [emit.read(of_row, slot, FLOAT, 4) for of_row in weights]
                if len(rows) == 1:
                    seen = b.fcmp_unordered("!=", each[0], zeros(FLOAT))
                    place = b.select(seen, place, nothing)
                spread = [emit.splat(weight, lanes) for weight in each]
                for c in range(count):
                    value = emit.read(place, word(c * lanes), self.vector, 4)
                    for r, weight in enumerate(spread):
                        i = (r * turns + turn) * count + c
                        following[i] = emit.multiply_add(weight, value, now[i])
        per_row = turns * count
        return [
            [
                functools.reduce(b.fadd, now[r * per_row + c : (r + 1) * per_row : count])
                for c in range(count)
            ]
            for r in range(len(rows))
        ]

    def _keep(self, row: Value, first: int, sums: Sequence[Value]) -> None:
        """Adds sums of a block to those before, which shrink as the greatest score grows."""
        emit = self.emit
        mixed = self.b.gep(self.memory.mixed, [self.b.mul(row, word(self.padded))])
        keep = emit.splat(emit.read(self.memory.keep, row, FLOAT, 4), self.lanes)
        for c, added in enumerate(sums):
            at = word((first + c) * self.lanes)
            before = emit.read(mixed, at, self.vector, 4)
            emit.write(emit.multiply_add(before, keep, added), mixed, at, 4)

    def _zeros(self) -> Value:
        module, name = self.b.module, "no_values"
        kind = ir.ArrayType(FLOAT, self._most * self.lanes)
        if name not in module.globals:
            made: Any = ir.GlobalVariable(module, kind, name)
            made.linkage, made.global_constant, made.initializer = "internal", True, zeros(kind)
        return self.b.bitcast(module.globals[name], FLOAT.as_pointer())
