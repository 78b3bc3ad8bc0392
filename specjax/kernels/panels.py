"""`multiply_panels`: the product of several rows with a matrix that is read in long runs."""

from __future__ import annotations

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, WORD, Emitter, Read, Value, word
from specjax.kernels.forms import Machine, Operands

TILE, _DEEP = 512, 128
"""The most columns and rows of the matrix that are copied at once, into the L2 cache."""

_LINE = 64
"""The bytes of a cache line."""

_MOST = 6
"""The rows of x whose sums are in registers at once."""


def multiply_panels(
    emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value
) -> None:
    """Multiplies many rows of x, for which most of the time goes into multiplying.

    The same number of rows from each stream of the matrix is copied to a cache, in float32, as
    panels: the numbers of a few columns lie side by side.  Then the sums of a group of rows of x
    stay in registers while a panel passes.  They are added to y, in the order of `orders.py`.
    """
    b, lanes, streams = emit.b, machine.lanes, machine.streams
    vector, wide = ir.VectorType(FLOAT, lanes), 2
    panel, each = wide * lanes, _DEEP // streams
    run = b.sdiv(of.depth, word(streams))  # the rows of a stream
    whole = b.add(start, emit.whole(b.sub(end, start), panel))
    size = b.mul(word(4 * _DEEP), b.add(word(TILE), of.rows))
    taken = b.call(emit.c("malloc"), [b.add(size, word(_LINE))])
    address = emit.whole(b.add(b.ptrtoint(taken, WORD), word(_LINE - 1)), _LINE)
    packed = b.inttoptr(address, FLOAT.as_pointer())
    beside = b.gep(packed, [word(_DEEP * TILE)])  # rows of x, of which each has `_DEEP` numbers

    def row_of(i: Value, stream: int) -> Value:
        return b.add(i, b.mul(run, word(stream)))

    def copy(k: Value, deep: Value) -> None:
        """Copies rows [k, deep) of each stream."""
        with emit.loop(k, deep, 1) as (i, _, _):
            turn = b.mul(b.sub(i, k), word(streams))
            rows = [b.gep(of.w, [b.mul(row_of(i, s), of.stride)]) for s in range(streams)]
            with emit.loop(start, whole, panel) as (j, _, _):
                begin = b.mul(b.sub(j, start), word(_DEEP))
                for stream, row in enumerate(rows):
                    at = b.add(begin, b.mul(b.add(turn, word(stream)), word(panel)))
                    for v in range(0, panel, lanes):
                        weights = emit.weights(row, b.add(j, word(v)), lanes)
                        emit.write(weights, packed, b.add(at, word(v)), 4)

    def copy_activations(k: Value, deep: Value) -> None:
        """Copies the numbers of x that rows [k, deep) of each stream are multiplied with.

        A loop over x itself would need an address for each row and stream, and a processor has too
        few registers for so many.
        """
        with emit.loop(word(0), of.rows, 1) as (m, _, _):
            row = b.gep(of.x, [b.mul(m, of.inner)])
            for stream in range(streams):
                place = b.gep(row, [row_of(k, stream)])
                to = b.gep(beside, [b.add(b.mul(m, word(_DEEP)), word(stream * each))])

                def copy_some(i: Value, read: Read, place: Value = place, to: Value = to) -> None:
                    emit.write(read(place, i), to, i, 4)

                emit.each(word(0), b.sub(deep, k), lanes, copy_some)

    def add(k: Value, deep: Value, j: Value, m: Value, many: int) -> None:
        """Adds rows [k, deep) of each stream to the sums of a panel's columns for `many` rows."""
        mine = [b.add(m, word(i)) for i in range(many)]
        activations = b.gep(beside, [b.mul(m, word(_DEEP))])
        sums = [b.gep(of.y, [b.add(b.mul(i, of.count), j)]) for i in mine]
        places = [(place, word(v * lanes)) for place in sums for v in range(wide)]
        before = [emit.read(*place, vector, 4) for place in places]
        begin = b.gep(packed, [b.mul(b.sub(j, start), word(_DEEP))])
        with emit.loop(word(0), b.sub(deep, k), 1, before) as (i, totals, following):
            row = b.gep(begin, [b.mul(i, word(streams * panel))])
            column = b.gep(activations, [i])
            now = list(totals)
            for stream in range(streams):
                weights = [
                    emit.read(row, word(stream * panel + v * lanes), vector, 4) for v in range(wide)
                ]
                for r in range(many):
                    at = word(r * _DEEP + stream * each)
                    factor = emit.splat(emit.read(column, at, FLOAT, 4), lanes)
                    for v, weight in enumerate(weights):
                        at = r * wide + v
                        now[at] = emit.multiply_add(factor, weight, now[at])
            following[:] = now
        for total, place in zip(totals, places, strict=True):
            emit.write(total, *place, 4)

    def one_by_one(row: Value, begin: Value) -> None:
        """Adds a row of the matrix to the sums of columns [begin, end)."""
        weights = b.gep(of.w, [b.mul(row, of.stride)])
        with emit.loop(word(0), of.rows, 1) as (m, _, _):
            y = b.gep(of.y, [b.mul(m, of.count)])
            factor = emit.read(of.x, b.add(b.mul(m, of.inner), row), FLOAT, 4)

            def add_one(j: Value, read: Read, y: Value = y, factor: Value = factor) -> None:
                weight, total = read(weights, j), read(y, j)
                many = factor if total.type == FLOAT else emit.splat(factor, lanes)
                emit.write(emit.multiply_add(many, weight, total), y, j, 4)

            emit.each(begin, end, lanes, add_one)

    groups = emit.groups(of.rows, _MOST)
    with emit.loop(word(0), run, each) as (k, _, _):
        deep = emit.least(b.add(k, word(each)), run)
        copy(k, deep)
        copy_activations(k, deep)
        with emit.loop(start, whole, panel) as (j, _, _):
            for first, last, size in groups:
                with emit.loop(first, last, size) as (m, _, _):
                    add(k, deep, j, m, size)
        some = b.select(b.icmp_signed("<", whole, end), deep, k)
        with emit.loop(k, some, 1) as (i, _, _):
            for stream in range(streams):
                one_by_one(row_of(i, stream), whole)
    with emit.loop(b.mul(run, word(streams)), of.depth, 1) as (row, _, _):
        one_by_one(row, start)
    b.call(emit.c("free"), [taken])
