"""`tile_dots`: `dots` for processors that multiply tiles of bfloat16 numbers (AMX).

A tile of weights [16 outputs, 32 inputs] times one of activations [32 inputs, 16 rows] is added to
the sums of 16 outputs and 16 rows.  So up to 16 rows need as many products of tiles as one, and
the sums of a row depend on no other row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, Emitter, Value, word, zeros
from specjax.kernels.forms import Operands

_SIDE, _DEEP = 16, 32
"""The outputs and the rows of a tile, and its inputs."""

_BYTES = 1024
"""The bytes of a tile."""

_AT_ONCE = 2
"""The tiles of rows that are multiplied with a tile of weights before the next one is read."""

_AHEAD = 1
"""Blocks of 16 outputs after which a prefetched one is multiplied."""

_SUMS, _WEIGHTS, _ROWS = (0, 1), 2, (3, 4)  # registers for tiles


def tile_dots(emit: Emitter, of: Operands, first: Value, last: Value) -> None:
    """Multiplies rows of a matrix of at least 16 outputs with rows of x."""
    _Dots(emit, of).write_all(first, last)


class _Dots:
    """Writes the instructions."""

    def __init__(self, emit: Emitter, of: Operands) -> None:
        self.emit, self.of, b = emit, of, emit.b
        self.b: Any = b
        self.steps = b.sdiv(b.add(of.inner, word(_DEEP - 1)), word(_DEEP))
        self.groups = b.sdiv(b.add(of.rows, word(_SIDE - 1)), word(_SIDE))
        # A pair of numbers of each row; fewer rows are narrower tiles.
        self.width = b.mul(emit.least(of.rows, word(_SIDE)), word(4))
        self.each = b.mul(self.width, word(_DEEP // 2))  # bytes of a tile of rows
        size = b.mul(b.mul(self.groups, self.steps), self.each)
        sizes = word(_AT_ONCE * _BYTES), word(_BYTES), word(64), size
        self.taken, (self.sums, self.tail, self.layout, self.packed) = emit.memory(*sizes)

    def write_all(self, first: Value, last: Value) -> None:
        b, emit, of = self.b, self.emit, self.of
        tiles = (*_SUMS, _WEIGHTS, *_ROWS)
        columns = [byte for tile in range(8) for byte in (64 * (tile in tiles), 0)]
        rows = [_SIDE * (tile in tiles) for tile in range(8)]
        layout = [1, *[0] * 15, *columns, *[0] * 16, *rows, *[0] * 8]
        emit.write(ir.Constant(ir.VectorType(INT8, 64), layout), self.layout, word(0), 1)
        for tile in (*_SUMS, *_ROWS):
            emit.write(b.trunc(self.width, INT8), self.layout, word(16 + 2 * tile), 1)
        emit.amx("ldtilecfg", self.layout)
        self._pack()
        with emit.loop(first, last, _SIDE) as (output, _, _):
            # The last tile begins earlier if fewer than 16 outputs are left.
            start = emit.least(output, b.sub(of.stride, word(_SIDE)))
            end = emit.least(b.add(output, word(_SIDE)), last)
            self._copy_tail(start)
            whole = emit.whole(self.groups, _AT_ONCE)
            for low, high, many in ((word(0), whole, _AT_ONCE), (whole, self.groups, 1)):
                with emit.loop(low, high, many) as (group, _, _):
                    self._multiply(start, group, many)
                    for i in range(many):
                        self._finish(start, output, end, b.add(group, word(i)), i)
        emit.amx("tilerelease")
        b.call(emit.c("free"), [self.taken])

    def _pack(self) -> None:
        """Writes the tiles of x: the rows of a pair of inputs side by side, then the next pair."""
        b, emit, of = self.b, self.emit, self.of
        none = zeros(ir.VectorType(INT8, 64))
        with emit.loop(word(0), word(_BYTES), 64) as (at, _, _):
            emit.write(none, self.tail, at, 64)
        whole, half = emit.whole(of.inner, _SIDE), b.sdiv(self.width, word(2))
        with emit.loop(word(0), b.mul(self.groups, word(_SIDE)), 1) as (row, _, _):
            group, column = b.sdiv(row, word(_SIDE)), b.srem(row, word(_SIDE))
            place = b.add(b.mul(group, b.mul(self.steps, self.each)), b.mul(column, word(4)))
            exists = b.icmp_signed("<", row, of.rows)
            x = b.gep(of.x, [b.mul(row, of.inner)])
            with b.if_then(exists):
                with emit.loop(word(0), whole, _SIDE) as (k, _, _):
                    read = emit.read(x, k, ir.VectorType(FLOAT, _SIDE), 4)
                    pairs = b.bitcast(emit.narrowed(read), ir.VectorType(INT32, _SIDE // 2))
                    for i in range(_SIDE // 2):
                        pair = b.extract_element(pairs, ir.Constant(INT32, i))
                        at = b.mul(b.add(k, word(2 * i)), half)
                        emit.write(pair, self.packed, b.add(place, at), 4)
            inside = b.icmp_signed("<", b.mul(column, word(4)), self.width)
            with b.if_then(inside):
                begin = b.select(exists, whole, word(0))
                with emit.loop(begin, b.mul(self.steps, word(_DEEP)), 1) as (k, _, _):
                    here = b.and_(exists, b.icmp_signed("<", k, of.inner))
                    at = b.select(here, k, word(0))
                    number = emit.narrowed(emit.read(b.select(here, x, of.x), at, FLOAT, 4))
                    number = b.select(here, number, ir.Constant(INT16, 0))
                    odd = b.srem(k, word(2))
                    at = b.add(b.mul(b.sub(k, odd), half), b.mul(odd, word(2)))
                    emit.write(number, self.packed, b.add(place, at), 2)

    def _copy_tail(self, start: Value) -> None:
        """Copies the last inputs of 16 outputs, if they are no whole tile."""
        b, emit, of = self.b, self.emit, self.of
        whole = emit.whole(of.inner, _DEEP)
        with emit.loop(word(0), word(_SIDE), 1) as (j, _, _):
            row = b.mul(b.add(start, j), of.inner)
            with emit.loop(whole, of.inner, 1) as (k, _, _):
                number = emit.read(of.w, b.add(row, k), INT16, 2)
                at = b.add(b.mul(j, word(64)), b.mul(b.sub(k, whole), word(2)))
                emit.write(number, self.tail, at, 2)

    def _multiply(self, start: Value, group: Value, many: int) -> None:
        """Writes the sums of 16 outputs and some tiles of rows."""
        b, emit, of = self.b, self.emit, self.of
        weights = b.bitcast(b.gep(of.w, [b.mul(start, of.inner)]), INT8.as_pointer())
        stride, whole = b.mul(of.inner, word(2)), b.sdiv(of.inner, word(_DEEP))
        ahead = b.mul(stride, word(_AHEAD * _SIDE))
        for i in range(many):
            emit.amx("tilezero", _SUMS[i])

        def add(step: Value, place: Value, stride: Value) -> None:
            emit.amx("tileloadd64", _WEIGHTS, place, stride)
            for i in range(many):
                at = b.add(b.mul(b.add(group, word(i)), self.steps), step)
                rows = b.gep(self.packed, [b.mul(at, self.each)])
                emit.amx("tileloadd64", _ROWS[i], rows, self.width)
                emit.amx("tdpbf16ps", _SUMS[i], _WEIGHTS, _ROWS[i])

        with emit.loop(word(0), whole, 1) as (step, _, _):
            following = b.add(ahead, b.mul(step, word(_BYTES)))
            for line in range(0, _BYTES, 64):
                emit.prefetch(b.gep(weights, [b.add(following, word(line))]))
            add(step, b.gep(weights, [b.mul(step, word(64))]), stride)
        with b.if_then(b.icmp_signed("<", whole, self.steps)):
            add(whole, self.tail, word(64))
        for i in range(many):
            emit.amx("tilestored64", _SUMS[i], b.gep(self.sums, [word(_BYTES * i)]), word(64))

    def _finish(self, start: Value, output: Value, end: Value, group: Value, tile: int) -> None:
        """Writes the sums of the outputs from `output` to `end`, of those from `start` on."""
        b, emit, of = self.b, self.emit, self.of
        sums = b.bitcast(b.gep(self.sums, [word(_BYTES * tile)]), FLOAT.as_pointer())
        row = b.mul(group, word(_SIDE))
        count = emit.least(b.sub(of.rows, row), word(_SIDE))
        with emit.loop(word(0), count, 1) as (r, _, _):
            y = b.gep(of.y, [b.mul(b.add(row, r), of.count)])
            with emit.loop(output, end, 1) as (j, _, _):
                at = b.add(b.mul(b.sub(j, start), word(_SIDE)), r)
                emit.write(emit.read(sums, at, FLOAT, 4), y, j, 4)
