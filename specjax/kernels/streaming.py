"""`stream`: the product of few rows with a matrix whose columns lie side by side."""

from __future__ import annotations

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Read, Value, word, zeros
from specjax.kernels.forms import Machine, Operands
from specjax.kernels.orders import AHEAD, row_at

FEW = 6
"""The most rows for which reading the matrix takes longer than multiplying.

The registers of every processor hold the sums of so many rows for a few columns.
"""

_WIDEST = 2048
"""The most columns for whose sums there is memory."""

_DEEP = 8
"""The rows of a single stream that pass at once; a prefetched one is read so many rows later."""

_LINE = 64
"""The bytes of a cache line."""


def widest(machine: Machine) -> int:
    """Returns the most columns whose sums stay in a cache while all rows of the matrix pass."""
    return 1024 if machine.streams == 1 else _WIDEST


def stream(emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value) -> None:
    """Multiplies up to `FEW` rows of x with as many columns as `widest` says.

    Most of the time goes into reading the matrix.  Memory is fastest when neighbouring columns are
    read one after the other.  So all columns of a few rows of the matrix pass at once, and the sums
    are read and written again each time.  Meanwhile what comes next is prefetched.  The last
    rows and columns, too few for vectors, are multiplied with one row of x at a time.
    """
    b, lanes, streams = emit.b, machine.lanes, machine.streams
    size = 4 if of.w.type.pointee == FLOAT else 2
    depth = _DEEP if streams == 1 else streams
    pitch = _WIDEST + _LINE // 4  # rows of powers of two would share few places of the L1 cache
    with b.goto_entry_block():
        room = b.alloca(ir.ArrayType(FLOAT, FEW * pitch))
        room.align = _LINE
        held = b.bitcast(room, FLOAT.as_pointer())

    def add(k: Value, deep: int, m: Value, many: int, begin: Value, stop: Value, step: int) -> None:
        """Adds the rows of turns [k, k + deep) of the matrix to the sums of `many` rows of x.

        `step` of the columns [begin, stop) pass at once.
        """
        rows = [row_at(emit, streams, of.depth, b.add(k, word(i))) for i in range(deep)]
        weights = [b.gep(of.w, [b.mul(row, of.stride)]) for row in rows]
        mine = [b.add(m, word(i)) for i in range(many)]
        sums = [b.gep(held, [b.sub(b.mul(i, word(pitch)), start)]) for i in mine]
        factors = [
            [emit.read(of.x, b.add(b.mul(i, of.inner), row), FLOAT, 4) for row in rows]
            for i in mine
        ]
        kind = FLOAT if step == 1 else ir.VectorType(FLOAT, step)
        if step > 1:
            factors = [[emit.splat(factor, step) for factor in row] for row in factors]
        ahead = b.mul(of.stride, word(_DEEP)) if streams == 1 else word(AHEAD // size)
        with emit.loop(begin, stop, step) as (j, _, _):
            if step > 1 and deep > 1:
                for row in weights:  # a vector is a line of the cache or a part of one
                    emit.prefetch(b.gep(row, [b.add(j, ahead)]))
            totals = [emit.read(place, j, kind, 4) for place in sums]
            for i in range(deep):
                weight = emit.weights(weights[i], j, None if step == 1 else step)
                totals = [
                    emit.multiply_add(row[i], weight, total)
                    for row, total in zip(factors, totals, strict=True)
                ]
            for total, place in zip(totals, sums, strict=True):
                emit.write(total, place, j, 4)

    whole = emit.whole(of.depth, depth)
    count = b.sub(end, start)
    middle = b.add(start, emit.whole(count, lanes))
    singly, together = [(word(0), of.rows, 1)], emit.groups(of.rows, FEW)
    vectors, rest = (start, middle, lanes), (middle, end, 1)
    with emit.loop(word(0), of.rows, 1) as (m, _, _):
        place = b.gep(held, [b.mul(m, word(pitch))])
        with emit.loop(word(0), count, 1) as (j, _, _):
            emit.write(zeros(FLOAT), place, j, 4)
    for low, high, deep, groups, columns in (
        (word(0), whole, depth, together, [vectors]),
        (word(0), whole, depth, singly, [rest]),
        (whole, of.depth, 1, singly, [vectors, rest]),
    ):
        with emit.loop(low, high, deep) as (k, _, _):
            for first, last, size_of_group in groups:
                with emit.loop(first, last, size_of_group) as (m, _, _):
                    for begin, stop, step in columns:
                        add(k, deep, m, size_of_group, begin, stop, step)
    with emit.loop(word(0), of.rows, 1) as (m, _, _):
        place, result = b.gep(held, [b.mul(m, word(pitch))]), b.gep(of.y, [b.mul(m, of.count)])

        def write(j: Value, read: Read, place: Value = place, result: Value = result) -> None:
            emit.write(read(place, j), result, b.add(start, j), 4)

        emit.each(word(0), count, lanes, write)
