"""Products of several rows with a matrix whose numbers are written to a cache first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Read, Value, word, zeros
from specjax.kernels.forms import Machine, Operands

TILE, DEEP = 512, 128
"""The most columns and rows of the matrix that are in the L2 cache at once."""

WIDE = 2
"""The vectors of a panel's columns."""

_MOST = 6
"""The rows of x whose sums are in registers at once."""


class Panels:
    """Adds the products of many rows of x and columns [start, end) to y, from panels in float32.

    A panel holds a few neighbouring columns of the matrix, row after row.
    While a panel is read, the sums of a group of rows of x stay in registers, so most of the time
    goes into multiplying.

    Attributes:
      ordered: all terms of a sum are added one by one, in the order of `orders.py`; else those of a
        panel are, and then the sums of the panels, which errs less.
      width: the columns of a panel.
      run: the rows of a stream of the matrix.
      packed: the panels; see `place`.
    """

    def __init__(
        self,
        emit: Emitter,
        lanes: int,
        streams: int,
        of: Operands,
        start: Value,
        end: Value,
        ordered: bool = True,
    ) -> None:
        self.emit, self.lanes, self.streams, self.of = emit, lanes, streams, of
        self.ordered = ordered
        self.start, self.end = start, end  # as many columns as some panels have, at most `TILE`
        self.width, self.each = WIDE * lanes, DEEP // streams
        self.run = emit.b.sdiv(of.depth, word(streams))
        sizes = word(4 * DEEP * TILE), emit.b.mul(of.rows, word(4 * DEEP))
        self.taken, places = emit.memory(*sizes)
        # Beside the panels are rows of x, each with `DEEP` numbers.
        self.packed, self.beside = (emit.b.bitcast(at, FLOAT.as_pointer()) for at in places)

    def row_of(self, i: Value, stream: int) -> Value:
        """Returns the row of the matrix that is number i of a stream."""
        b = self.emit.b
        return b.add(i, b.mul(self.run, word(stream)))

    def place(self, column: Value, turn: Value) -> Value:
        """Returns the index in `packed` of a panel's first column, and of a row of `turns`.

        The order is that of the sums: row i of each stream, then row i + 1 of each.
        """
        b = self.emit.b
        begin = b.mul(b.sub(column, self.start), word(DEEP))
        return b.add(begin, b.mul(turn, word(self.width)))

    @contextlib.contextmanager
    def turns(self) -> Iterator[tuple[Value, Value]]:
        """Writes a loop over rows [k, deep) of each stream; the body writes these rows' panels."""
        emit, b = self.emit, self.emit.b
        groups = emit.groups(self.of.rows, _MOST)
        with emit.loop(word(0), self.run, self.each) as (k, _, _):
            deep = emit.least(b.add(k, word(self.each)), self.run)
            yield k, deep
            self._copy_activations(k, deep)
            with emit.loop(self.start, self.end, self.width) as (j, _, _):
                for first, last, size in groups:
                    with emit.loop(first, last, size) as (m, _, _):
                        self._add(b.sub(deep, k), j, m, size)
        b.call(emit.c("free"), [self.taken])

    def _copy_activations(self, k: Value, deep: Value) -> None:
        """Copies the numbers of x that rows [k, deep) of each stream are multiplied with.

        A loop over x itself would need an address for each row and stream, and a processor has too
        few registers for so many.
        """
        emit, b, of = self.emit, self.emit.b, self.of
        with emit.loop(word(0), of.rows, 1) as (m, _, _):
            row = b.gep(of.x, [b.mul(m, of.inner)])
            for stream in range(self.streams):
                place = b.gep(row, [self.row_of(k, stream)])
                at = b.add(b.mul(m, word(DEEP)), word(stream * self.each))
                to = b.gep(self.beside, [at])

                def copy_some(i: Value, read: Read, place: Value = place, to: Value = to) -> None:
                    emit.write(read(place, i), to, i, 4)

                emit.each(word(0), b.sub(deep, k), self.lanes, copy_some)

    def _add(self, count: Value, j: Value, m: Value, many: int) -> None:
        """Adds `count` rows of each stream to the sums of a panel's columns for `many` rows."""
        emit, b, of, lanes = self.emit, self.emit.b, self.of, self.lanes
        vector = ir.VectorType(FLOAT, lanes)
        mine = [b.add(m, word(i)) for i in range(many)]
        activations = b.gep(self.beside, [b.mul(m, word(DEEP))])
        sums = [b.gep(of.y, [b.add(b.mul(i, of.count), j)]) for i in mine]
        places = [(place, word(v * lanes)) for place in sums for v in range(WIDE)]
        before = [emit.read(*place, vector, 4) for place in places]
        begin = b.gep(self.packed, [self.place(j, word(0))])
        first = before if self.ordered else [zeros(vector)] * len(before)
        with emit.loop(word(0), count, 1, first) as (i, totals, following):
            row = b.gep(begin, [b.mul(i, word(self.streams * self.width))])
            column = b.gep(activations, [i])
            now = list(totals)
            for stream in range(self.streams):
                weights = [
                    emit.read(row, word(stream * self.width + v * lanes), vector, 4)
                    for v in range(WIDE)
                ]
                for r in range(many):
                    at = word(r * DEEP + stream * self.each)
                    factor = emit.splat(emit.read(column, at, FLOAT, 4), lanes)
                    for v, weight in enumerate(weights):
                        at = r * WIDE + v
                        now[at] = emit.multiply_add(factor, weight, now[at])
            following[:] = now
        for total, place, held in zip(totals, places, before, strict=True):
            emit.write(total if self.ordered else b.fadd(held, total), *place, 4)


def multiply_panels(
    emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value
) -> None:
    """Adds the products of many rows with columns [start, end) of a matrix [in, out] to y.

    The same number of rows from each stream of the matrix is copied at once, so that it is read in
    long runs.  Columns that do not fill a panel, and rows that are left over, come last.
    """
    b, lanes, streams = emit.b, machine.lanes, machine.streams
    whole = b.add(start, emit.whole(b.sub(end, start), WIDE * lanes))
    panels = Panels(emit, lanes, streams, of, start, whole)
    with panels.turns() as (k, deep), emit.loop(k, deep, 1) as (i, _, _):
        turn = b.mul(b.sub(i, k), word(streams))
        rows = [b.gep(of.w, [b.mul(panels.row_of(i, s), of.stride)]) for s in range(streams)]
        with emit.loop(start, whole, panels.width) as (j, _, _):
            for stream, row in enumerate(rows):
                at = panels.place(j, b.add(turn, word(stream)))
                for v in range(0, panels.width, lanes):
                    weights = emit.weights(row, b.add(j, word(v)), lanes)
                    emit.write(weights, panels.packed, b.add(at, word(v)), 4)

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

    some = b.select(b.icmp_signed("<", whole, end), panels.run, word(0))
    with emit.loop(word(0), some, 1) as (i, _, _):
        for stream in range(streams):
            one_by_one(panels.row_of(i, stream), whole)
    with emit.loop(b.mul(panels.run, word(streams)), of.depth, 1) as (row, _, _):
        one_by_one(row, start)
