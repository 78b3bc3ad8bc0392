"""The product of `digits.py` for processors that multiply tiles of bytes (AMX).

A tile of codes [16 outputs, 64 inputs] is multiplied with one of digits [64 inputs, 16 columns],
and a column is a digit of a row.  So up to 5 rows of three digits need as many products of tiles as
one.  Sums are whole numbers, and a row's bits depend on no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.codes import Beside, Codes
from specjax.kernels.coding import Coding
from specjax.kernels.digits import Digits, MadeDigits, joined
from specjax.kernels.emitting import FLOAT, INT8, INT32, Emitter, Value, word, zeros

_SIDE, _DEEP = 16, 64
"""The outputs and the columns of a tile, and its inputs."""

_BYTES = 1024
"""The bytes of a tile."""

_AT_ONCE = 2
"""The tiles of codes that are multiplied with as many of columns before the next ones are read."""

_FEW = 1
"""The most rows that are multiplied without tiles, whose sums have to be turned.

That took .83 to .90 of the time with a target of 20M parameters and about as long with 110M; two
rows of three digits .93 and 1.09 (two Intel cores, November 2026).
"""

_IN_ORDER = 2
"""The most groups of rows for which tiles of codes pass one by one, in the order of memory.

With two tiles at once 2 to 8 rows of 110M parameters took 1.07 to 1.22 times as long.
"""

_SUMS, _CODES, _COLUMNS = (0, 1, 2, 3), (4, 5), (6, 7)  # registers for tiles


class TileDigits(Digits):
    """The `sharing.Work` as `Codes`."""

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return emit.least(threads, worth)  # a part multiplies little for the digits that it makes

    def room(self, emit: Emitter, rows: Value, inner: Value) -> Value:
        few = super().room(emit, rows, inner)
        many = emit.room(*Columns(emit, self.coding, rows, inner).sizes)
        return emit.b.select(_are_few(emit, rows), few, many)

    def write_digits(self, function: ir.Function) -> None:
        def in_columns(function: ir.Function) -> None:
            emit = Emitter(function)
            x, memory, rows, inner = function.args
            Columns(emit, self.coding, rows, inner, memory).write(x)
            emit.b.ret_void()

        _either(function, lambda emit: function.args[2], super().write_digits, in_columns)

    def write_products(self, function: ir.Function) -> None:
        def rows(emit: Emitter) -> Value:
            return emit.b.mul(*function.args[-5:-3])

        def in_tiles(function: ir.Function) -> None:
            _Part(self, function).write_all()

        _either(function, rows, super().write_products, in_tiles)


def _are_few(emit: Emitter, rows: Value) -> Value:
    """Returns whether so many rows are multiplied without tiles."""
    return emit.b.icmp_signed("<=", rows, word(_FEW))


def _either(
    function: ir.Function, rows: Callable[[Emitter], Value], *ways: Callable[[ir.Function], None]
) -> None:
    """Writes a function for few rows, one for more of them, and the choice, which changes no bit.

    `rows` returns their number, with the function's emitter.
    """
    made = [
        ir.Function(function.module, function.ftype, f"{function.name}_of_{name}_rows")
        for name in ("few", "many")
    ]
    for each, way in zip(made, ways, strict=True):
        each.linkage = "internal"
        way(each)
    emit = Emitter(function)
    b: Any = emit.b
    with b.if_else(_are_few(emit, rows(emit))) as branches:
        for each, branch in zip(made, branches, strict=True):
            with branch:
                b.call(each, function.args)
    b.ret_void()


class Columns(MadeDigits):
    """Digits in tiles, each for a group of rows: a column is a digit of a row, and a row of a tile
    has four of its bytes for each column.  There is also what the sums of each column begin with.
    """

    def __init__(
        self, emit: Emitter, coding: Coding, rows: Value, inner: Value, memory: Value | None = None
    ) -> None:
        super().__init__(emit, coding)
        b, self.rows, self.inner = self.b, rows, inner
        most = _SIDE // self.count  # the rows of a tile
        self.steps_of_inner = b.sdiv(b.add(inner, word(_DEEP - 1)), word(_DEEP))
        self.groups = b.sdiv(b.add(rows, word(most - 1)), word(most))
        self.most = emit.least(rows, word(most))  # fewer rows are narrower tiles
        self.width = b.mul(self.most, word(4 * self.count))
        # This is a power of two, so that no row of a tile lies in two cache lines.
        self.stride = word(_DEEP)
        for size in (_DEEP // 2, _DEEP // 4):
            fits = b.icmp_signed("<=", self.width, word(size))
            self.stride = b.select(fits, word(size), self.stride)
        self.of_step = b.mul(self.stride, word(_DEEP // 4))  # bytes of a tile
        self.of_group = b.mul(self.steps_of_inner, self.of_step)
        tiles, starts = b.mul(self.groups, self.of_group), b.mul(self.groups, word(4 * _SIDE))
        self.sizes = b.mul(rows, word(4)), tiles, starts
        if memory is not None:
            self.steps, (self.tiles, starts) = self.places(memory)
            self.starts = b.bitcast(starts, INT32.as_pointer())

    def of_row(self, row: Value) -> Value:
        """Returns the column of the first digit of a row."""
        return self.b.mul(self.b.srem(row, self.most), word(self.count))

    def write(self, x: Value) -> None:
        """Writes all rows of x."""
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.groups, 1) as (group, _, _):
            emit.write(zeros(self.words), self.starts, b.mul(group, word(_SIDE)), 4)
        with emit.loop(word(0), self.rows, 1) as (row, _, _):
            self._write_row(b.gep(x, [b.mul(row, self.inner)]), row)

    def _write_row(self, x: Value, row: Value) -> None:
        b, emit = self.b, self.emit
        step = self.write_step(x, self.inner, self.steps, row)
        group, column = b.sdiv(row, self.most), self.of_row(row)
        tiles = b.gep(self.tiles, [b.mul(group, self.of_group)])
        tiles = b.bitcast(b.gep(tiles, [b.mul(column, word(4))]), INT32.as_pointer())
        words = b.sdiv(self.stride, word(4))
        ones = ir.Constant(self.bytes, [1] * _DEEP)
        fours = [range(4 * i, 4 * i + 4) for i in range(_SIDE // 4)]
        with emit.loop(word(0), self.inner, _SIDE, [zeros(self.words)]) as (at, now, following):
            digits = self.digits_of(x, at, step)
            for i, four in enumerate(fours):
                place = b.mul(b.add(b.sdiv(at, word(4)), word(i)), words)
                self._write_columns(emit.lanes(digits, four), tiles, place)
            if self.offset:
                following[0] = emit.add_products(ones, b.bitcast(digits, self.bytes), now[0])
        if self.offset:
            first, *others = (emit.lanes(now[0], four) for four in fours)
            for other in others:
                first = b.add(first, other)
            less = b.mul(first, ir.Constant(first.type, [-self.offset] * 4))
            self._write_columns(less, self.starts, b.add(b.mul(group, word(_SIDE)), column))

    def _write_columns(self, digits: Value, base: Value, at: Value) -> None:
        """Writes a word for each digit.  A fourth one means nothing: the next row, which is written
        later, lies there, or nobody reads it."""
        if self.count == 1:
            digits = self.b.extract_element(digits, ir.Constant(INT32, 0))
        self.emit.write(digits, base, at, 4)


class _Part(Beside):
    """Writes the instructions of one part of the products."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        emit = self.emit
        self.columns = Columns(emit, self.coding, self.rows, self.inner, self.x)
        self.groups, self.most = self.columns.groups, self.columns.most
        self.high = emit.least(self.outputs, word(_SIDE))  # the outputs of a tile
        sizes = word(_AT_ONCE**2 * _BYTES), word(_AT_ONCE * _BYTES), word(64)
        self.taken, (sums, self.tail, self.layout) = emit.memory(*sizes)
        self.sums = self.b.bitcast(sums, INT32.as_pointer())

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        self._configure()
        with b.if_then(b.icmp_signed(">", b.srem(self.inner, word(_DEEP)), word(0))):
            with emit.loop(word(0), word(_AT_ONCE * _BYTES), _DEEP) as (at, _, _):
                emit.write(zeros(self.columns.bytes), self.tail, at, 1)
        middle = emit.whole(b.sub(self.last, self.first), _AT_ONCE * _SIDE)
        middle = b.select(b.icmp_signed(">", self.groups, word(_IN_ORDER)), middle, word(0))
        middle = b.add(self.first, middle)
        whole = emit.whole(self.groups, _AT_ONCE)
        for start, stop, blocks in ((self.first, middle, _AT_ONCE), (middle, self.last, 1)):
            with emit.loop(start, stop, blocks * _SIDE) as (output, _, _):
                # The last tile begins earlier if fewer than 16 outputs are left.
                output = emit.least(output, b.sub(self.outputs, self.high))
                self._copy_tail(output, blocks)
                for low, high, many in ((word(0), whole, _AT_ONCE), (whole, self.groups, 1)):
                    with emit.loop(low, high, many) as (group, _, _):
                        self._multiply(output, blocks, group, many)
                        for i in range(many):
                            for j in range(blocks):
                                first = b.add(output, word(j * _SIDE))
                                self._finish(first, b.add(group, word(i)), i * blocks + j)
        emit.amx("tilerelease")
        b.call(emit.c("free"), [self.taken])
        b.ret_void()

    def _configure(self) -> None:
        """Sets the sizes of tiles."""
        b, emit = self.b, self.emit
        emit.write(ir.Constant(ir.VectorType(INT8, 64), [1, *[0] * 63]), self.layout, word(0), 1)
        sizes = dict.fromkeys(_SUMS, (self.high, self.columns.width))
        sizes |= dict.fromkeys(_CODES, (self.high, word(_DEEP)))
        sizes |= dict.fromkeys(_COLUMNS, (word(_DEEP // 4), self.columns.width))
        for tile, (rows, size) in sizes.items():
            for at, value in ((16 + 2 * tile, size), (48 + tile, rows)):
                emit.write(b.trunc(value, INT8), self.layout, word(at), 1)
        emit.amx("ldtilecfg", self.layout)

    def _copy_tail(self, output: Value, blocks: int) -> None:
        """Copies the last codes of some outputs, if they are no whole tile."""
        b, emit = self.b, self.emit
        whole = emit.whole(self.inner, _DEEP)
        count = self.high if blocks == 1 else word(blocks * _SIDE)
        with b.if_then(b.icmp_signed("<", whole, self.inner)):
            with emit.loop(word(0), count, 1) as (j, _, _):
                row = b.gep(self.codes, [b.mul(b.add(output, j), self.inner)])
                with emit.loop(whole, self.inner, _SIDE) as (at, _, _):
                    place = b.add(b.mul(j, word(_DEEP)), b.sub(at, whole))
                    emit.write(emit.read_bytes(row, at, _SIDE, _SIDE), self.tail, place, 1)

    def _multiply(self, output: Value, blocks: int, group: Value, many: int) -> None:
        """Writes the sums of some blocks of 16 outputs and some groups of rows."""
        b, emit, columns = self.b, self.emit, self.columns
        codes = b.gep(self.codes, [b.mul(output, self.inner)])
        size = b.mul(self.inner, word(_SIDE))  # of the codes of a block
        following = b.mul(size, word(blocks))
        for i in range(many):
            at = b.mul(b.add(group, word(i)), word(_SIDE))
            start = b.bitcast(b.gep(columns.starts, [at]), INT8.as_pointer())
            for j in range(blocks):
                emit.amx("tileloadd64", _SUMS[i * blocks + j], start, word(0))

        def add(step: Value, place: Value, of_block: Value, stride: Value) -> None:
            for j in range(blocks):
                here = b.gep(place, [b.mul(of_block, word(j))])
                emit.amx("tileloadd64", _CODES[j], here, stride)
            for i in range(many):
                at = b.mul(b.add(group, word(i)), columns.of_group)
                at = b.add(at, b.mul(step, columns.of_step))
                emit.amx("tileloadd64", _COLUMNS[i], b.gep(columns.tiles, [at]), columns.stride)
                for j in range(blocks):
                    name = "tdpbssd" if self.coding.signed else "tdpbusd"
                    emit.amx(name, _SUMS[i * blocks + j], _CODES[j], _COLUMNS[i])

        whole = b.sdiv(self.inner, word(_DEEP))
        with emit.loop(word(0), whole, 1) as (step, _, _):
            ahead = b.add(following, b.mul(step, word(blocks * _BYTES)))
            with b.if_then(b.icmp_signed("==", group, word(0))):
                for line in range(0, blocks * _BYTES, 64):
                    emit.prefetch(b.gep(codes, [b.add(ahead, word(line))]))
            add(step, b.gep(codes, [b.mul(step, word(_DEEP))]), size, self.inner)
        with b.if_then(b.icmp_signed("<", whole, columns.steps_of_inner)):
            add(whole, self.tail, word(_BYTES), word(_DEEP))
        for tile in range(many * blocks):
            sums = b.bitcast(b.gep(self.sums, [word(_BYTES // 4 * tile)]), INT8.as_pointer())
            emit.amx("tilestored64", _SUMS[tile], sums, word(64))

    def _finish(self, output: Value, group: Value, tile: int) -> None:
        """Writes the products of a group of rows with 16 outputs."""
        b, emit, columns = self.b, self.emit, self.columns
        sums = b.gep(self.sums, [word(_BYTES // 4 * tile)])
        read = [emit.read(sums, word(_SIDE * j), columns.words, 4) for j in range(_SIDE)]
        for column, each in enumerate(emit.turned(read)):
            emit.write(each, sums, word(_SIDE * column), 4)
        scales = self.scales_of_some(output, _SIDE, self.high)
        first = b.mul(group, self.most)
        end = emit.least(b.add(first, self.most), self.rows)
        with emit.loop(first, end, 1) as (row, _, _):
            column = columns.of_row(row)
            digits = [
                emit.read(sums, b.mul(b.add(column, word(d)), word(_SIDE)), columns.words, 4)
                for d in range(columns.count)
            ]
            step = emit.splat(emit.read(columns.steps, row, FLOAT, 4), _SIDE)
            product = b.fmul(b.fmul(joined(emit, digits), step), scales)
            place = b.add(b.mul(row, self.outputs), output)
            emit.write_some(product, self.y, place, self.high, 4)
