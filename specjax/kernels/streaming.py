"""`stream`: the product of few rows with a matrix whose columns lie side by side."""

from __future__ import annotations

import itertools

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Value, word
from specjax.kernels.forms import Machine, Operands

FEW = 6
"""The most rows for which reading the matrix takes longer than multiplying."""

_AT_ONCE = {32: FEW, 16: 2}
"""The rows of x whose sums pass together, by the number of the processor's vector registers."""

_AHEAD = 8
"""The rows of the matrix after which a prefetched one is read."""

_LINE = 64
"""The bytes of a cache line."""


def stream(emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value) -> None:
    """Multiplies up to `FEW` rows of x, for which most of the time goes into reading the matrix.

    Memory is fastest when neighbouring columns are read one after the other.  So all columns of a
    few rows of the matrix pass at once, and the sums are read and written again each time.
    Meanwhile the next rows are prefetched, and further rows of x find these in a cache.  The last
    rows and columns, too few for vectors, are multiplied with one row of x at a time.
    """
    b, lanes = emit.b, machine.lanes
    # Short vectors pass by cache lines, two at once, or the loop would take longer than memory.
    size = 4 if of.w.type.pointee == FLOAT else 2
    depth, at_once = (8, lanes) if machine.registers >= 32 else (4, 4 * lanes)

    def add(k: Value, deep: int, m: Value, many: int, begin: Value, stop: Value, step: int) -> None:
        """Adds rows [k, k + deep) of the matrix to the sums of `many` rows of x.

        Args:
          begin, stop: the columns.
          step: how many of them pass at once.
        """
        weights = [b.gep(of.w, [b.mul(b.add(k, word(i)), of.stride)]) for i in range(deep)]
        mine = [b.add(m, word(i)) for i in range(many)]
        sums = [b.gep(of.y, [b.mul(i, of.count)]) for i in mine]
        factors = [
            [
                emit.read(of.x, b.add(b.add(b.mul(i, of.inner), k), word(j)), FLOAT, 4)
                for j in range(deep)
            ]
            for i in mine
        ]
        kind = FLOAT if step == 1 else ir.VectorType(FLOAT, step)
        if step > 1:
            factors = [[emit.splat(factor, step) for factor in row] for row in factors]
        with emit.loop(begin, stop, step) as (j, _, _):
            if step > 1 and deep > 1:
                later = b.add(j, b.mul(of.stride, word(_AHEAD)))
                for row, line in itertools.product(weights, range(0, step, _LINE // size)):
                    emit.prefetch(b.gep(row, [b.add(later, word(line))]))
            totals = [emit.read(place, j, kind, 4) for place in sums]
            for i in range(deep):
                weight = emit.weights(weights[i], j, None if step == 1 else step)
                totals = [
                    emit.multiply_add(row[i], weight, total)
                    for row, total in zip(factors, totals, strict=True)
                ]
            for total, place in zip(totals, sums, strict=True):
                emit.write(total, place, j, 4)

    whole = emit.whole(of.inner, depth)
    count = b.sub(end, start)
    far, near = (b.add(start, emit.whole(count, step)) for step in (at_once, lanes))
    singly, together = [(word(0), of.rows, 1)], emit.groups(of.rows, _AT_ONCE[machine.registers])
    wide, narrow, rest = (start, far, at_once), (far, near, lanes), (near, end, 1)
    many = [wide] if at_once == lanes else [wide, narrow]
    for low, high, deep, groups, columns in (
        (word(0), whole, depth, together, many),
        (word(0), whole, depth, singly, [rest]),
        (whole, of.inner, 1, singly, [*many, rest]),
    ):
        with emit.loop(low, high, deep) as (k, _, _):
            for first, last, size in groups:
                with emit.loop(first, last, size) as (m, _, _):
                    for begin, stop, step in columns:
                        add(k, deep, m, size, begin, stop, step)
