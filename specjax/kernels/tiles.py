"""The product of `codes.py` for processors that multiply tiles of bytes (AMX), in whole numbers.

    x[m, i] = step[m, s] * (d2 * 256^2 + d1 * 256 + d0),    digits d of one byte with a sign

`step` is the largest absolute value of a segment s of the inputs over 2^23, about, so three digits
are as exact as float32.  A tile of codes [16 outputs, bytes] times one of digits [bytes, 16
columns] is exact, and becomes float32 numbers once a segment.  A column is a digit of a row, and
five rows are a tile.  So a row's bits depend on no other row, and a pass over five rows takes about
as long as a pass over one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from specjax.kernels.codes import FP4, Beside, Codes
from specjax.kernels.emitting import FLOAT, INT8, INT32, Emitter, Value, word, zeros

_ROWS, _DIGITS = 5, 3
"""The rows of a tile, and the digits of a number."""

_LIMIT = 8355000.0
"""Somewhat less than 127 * (256^2 + 256 + 1), the largest number of three digits."""

_CHUNK = 256
"""The inputs of 16 outputs whose codes are copied at once.

With more of them memory rests while tiles are multiplied: 1024 took half as long again.
"""

_AHEAD = 2
"""The chunks after which a prefetched one is multiplied."""

_SMALL = 8192
"""The bytes of the codes of 16 outputs that stay in L1 until they are copied."""

_UNROLLED = 4
"""The outputs whose codes are copied in one turn of a loop."""

_DEEP = 2
"""The segments whose products are on their way at once: each is in a register of its own."""

_C, _A, _B = (0, 1), (2, 3), (4, 5)  # registers for tiles
_BYTE = INT8.as_pointer()
_VECTOR, _WORDS = ir.VectorType(FLOAT, 16), ir.VectorType(INT32, 16)


@dataclasses.dataclass(frozen=True)
class Tiles(Codes):
    """The `sharing.Work` as `Codes`."""

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        """Returns one part for a single thread, since each part makes the digits anew."""
        alone = emit.b.icmp_signed("==", threads, word(1))
        return emit.b.select(alone, word(1), super().parts(emit, sizes, threads, worth))

    def write_part(self, function: ir.Function) -> None:
        _Part(self, function).write_all()


class _Chunk(NamedTuple):
    """Some segments of the inputs of 16 outputs."""

    output: Value  # the first
    begin: Value  # the first segment
    end: Value
    half: Value  # the number of the chunk's first segment in the memory of copies

    def place(self, b: Any, segment: Value) -> Value:
        """Returns the number of a segment in the memory of copies."""
        return b.add(self.half, b.sub(segment, self.begin))


class _Part(Beside):
    """Writes the instructions of one part."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        self.segment = self.coding.segment
        self.depth = min(self.segment, 64)  # bytes of a tile's row
        b = self.b
        self.chunk = max(1, _CHUNK // self.segment)
        self.segments = b.sdiv(self.inner, word(self.segment))
        self.tiles = b.sdiv(b.add(self.rows, word(_ROWS - 1)), word(_ROWS))
        each = b.mul(self.tiles, self.segments)
        pieces = [
            b.mul(each, word(16 * self.segment)),  # digits
            b.mul(each, word(64)),  # steps
            b.mul(each, word(64)),  # sums of digits
            word(2 * 16 * self.chunk * self.segment),  # codes
            word(2 * 64 * self.chunk),  # scales
            word(2 * 64 * self.chunk),  # zeros
            b.mul(self.tiles, word(1024)),  # totals
            b.mul(self.tiles, word(1024 * self.chunk)),  # products
            word(64),  # the layout of tiles
        ]
        self.taken, places = self.emit.memory(*pieces)
        self.digits, steps, sums, self.copied, scales, zero, totals, products, layout = places
        self.steps, self.sums, self.of_scales, self.of_zeros, self.totals, self.products = (
            b.bitcast(place, FLOAT.as_pointer())
            for place in (steps, sums, scales, zero, totals, products)
        )
        self.layout = layout

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        width = {**dict.fromkeys(_C, 64), **dict.fromkeys(_A, self.depth), **dict.fromkeys(_B, 64)}
        rows = dict.fromkeys((*_C, *_A), 16) | dict.fromkeys(_B, self.depth // 4)
        columns = [byte for tile in range(8) for byte in (width.get(tile, 0), 0)]
        layout = [
            1,
            *[0] * 15,
            *columns,
            *[0] * 16,
            *(rows.get(tile, 0) for tile in range(8)),
            *[0] * 8,
        ]
        emit.write(ir.Constant(ir.VectorType(INT8, 64), layout), self.layout, word(0), 1)
        emit.amx("ldtilecfg", self.layout)
        self._each_tile(self._write_digits)
        self._multiply()
        emit.amx("tilerelease")
        b.call(emit.c("free"), [self.taken])
        b.ret_void()

    def _each_tile(self, do: Any) -> None:
        """Runs `do` with the number of each tile of rows, its first row, and its rows."""
        tile: Value = word(0)
        for first, last, many in self.emit.groups(self.rows, _ROWS):
            with self.emit.loop(first, last, many, [tile]) as (row, (now,), following):
                do(now, row, many)
                following[0] = self.b.add(now, word(1))
            tile = now

    def _write_digits(self, tile: Value, row: Value, many: int) -> None:
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.segments, 1) as (segment, _, _):
            at = b.add(b.mul(tile, self.segments), segment)
            quads: list[list[Value]] = [
                [zeros(_WORDS)] * 16 for _ in range(max(1, self.segment // 64))
            ]
            steps, sums = zeros(_VECTOR), zeros(_VECTOR)
            for r in range(many):
                start = b.mul(b.add(row, word(r)), self.inner)
                step, digits = self._digits_of(b.add(start, b.mul(segment, word(self.segment))))
                for d, vectors in enumerate(digits):
                    column = ir.Constant(INT32, d * _ROWS + r)
                    factor = ir.Constant(FLOAT, 256.0**d * (0.5 if self.coding.fp4 else 1))
                    steps = b.insert_element(steps, b.fmul(step, factor), column)
                    if self.corrects:
                        total = vectors[0]
                        for vector in vectors[1:]:
                            total = b.add(total, vector)
                        total = b.sitofp(emit.sum(total), FLOAT)
                        sums = b.insert_element(sums, total, column)
                    each = [b.trunc(vector, ir.VectorType(INT8, 16)) for vector in vectors]
                    for k, quad in enumerate(quads):
                        quad[d * _ROWS + r] = self._as_words(each[4 * k : 4 * k + 4])
            emit.write(steps, self.steps, b.mul(at, word(16)), 4)
            emit.write(sums, self.sums, b.mul(at, word(16)), 4)
            place = b.gep(self.digits, [b.mul(at, word(16 * self.segment))])
            for k, quad in enumerate(quads):
                for i, turned in enumerate(emit.turned(quad)[: self.segment // 4]):
                    emit.write(turned, place, word(64 * (16 * k + i)), 1)

    def _digits_of(self, start: Value) -> tuple[Value, list[list[Value]]]:
        """Returns the step of a segment of a row, and the vectors of each digit."""
        b, emit = self.b, self.emit
        read = [
            emit.read(self.x, b.add(start, word(16 * i)), _VECTOR, 4)
            for i in range(self.segment // 16)
        ]
        most = emit.magnitude(read)
        limit = ir.Constant(FLOAT, _LIMIT)
        over = emit.splat(b.fdiv(limit, most), 16)
        if self.coding.bits == 4:  # the low halves of bytes first, which are even inputs
            pairs = list(zip(read[0::2], read[1::2], strict=True))
            read = [
                b.shuffle_vector(x, y, ir.Constant(_WORDS, list(range(first, 32, 2))))
                for first in (0, 1)
                for x, y in pairs
            ]
        digits: list[list[Value]] = [[], [], []]
        to_high, to_next = (ir.Constant(_WORDS, [by] * 16) for by in (24, 8))
        for vector in read:
            rest = b.fptosi(emit.rounded(b.fmul(vector, over)), _WORDS)
            for vectors in digits[:2]:
                vectors.append(b.ashr(b.shl(rest, to_high), to_high))
                rest = b.ashr(b.sub(rest, vectors[-1]), to_next)
            digits[2].append(rest)
        return b.fdiv(most, limit), digits

    def _as_words(self, vectors: Sequence[Value]) -> Value:
        """Returns up to 64 bytes as 16 words."""
        b, made = self.b, list(vectors)
        while len(made) < 4:
            made.append(zeros(made[0].type))
        while len(made) > 1:
            both = list(range(2 * made[0].type.count))
            mask = ir.Constant(ir.VectorType(INT32, len(both)), both)
            made = [
                b.shuffle_vector(x, y, mask) for x, y in zip(made[0::2], made[1::2], strict=True)
            ]
        return b.bitcast(made[0], _WORDS)

    def _multiply(self) -> None:
        """Computes the products of all rows, with a chunk of the inputs of 16 outputs at a time.

        While tiles of one chunk are multiplied, the codes of the next one are copied.
        """
        b, emit = self.b, self.emit
        chunks = b.sdiv(b.add(self.segments, word(self.chunk - 1)), word(self.chunk))
        blocks = b.sdiv(b.add(b.sub(self.last, self.first), word(15)), word(16))
        count = b.mul(blocks, chunks)

        def chunk(number: Value) -> _Chunk:
            # The last outputs are multiplied with those before them, if they are fewer than 16.
            output = b.add(self.first, b.mul(b.sdiv(number, chunks), word(16)))
            begin = b.mul(b.srem(number, chunks), word(self.chunk))
            return _Chunk(
                emit.least(output, b.sub(self.outputs, word(16))),
                begin,
                emit.least(b.add(begin, word(self.chunk)), self.segments),
                b.mul(b.and_(number, word(1)), word(self.chunk)),
            )

        self._copy(chunk(word(0)))
        with emit.loop(word(0), count, 1) as (number, _, _):
            now = chunk(number)
            with emit.loop(word(0), self.tiles, 1) as (tile, _, _):
                middle = b.add(now.begin, emit.whole(b.sub(now.end, now.begin), _DEEP))
                for low, high, many in ((now.begin, middle, _DEEP), (middle, now.end, 1)):
                    with emit.loop(low, high, many) as (segment, _, _):
                        self._multiply_tiles(now, tile, segment, many)
            following = b.add(number, word(1))
            with b.if_then(b.icmp_signed("<", following, count)):
                self._copy(chunk(following))
            ahead = chunk(emit.least(b.add(number, word(_AHEAD)), b.sub(count, word(1))))
            with emit.loop(word(0), self.tiles, 1) as (tile, _, _):
                self._add(now, tile, ahead)
            with b.if_then(b.icmp_signed("==", now.end, self.segments)):
                self._each_tile(lambda tile, row, many: self._finish(now.output, tile, row, many))

    def _copy(self, chunk: _Chunk) -> None:
        """Writes the codes of 16 outputs as bytes with a sign, and their scales and zeros."""
        with self.emit.loop(chunk.begin, chunk.end, 1) as (segment, _, _):
            self._copy_segment(chunk, segment)

    def _copy_segment(self, chunk: _Chunk, segment: Value) -> None:
        b, emit = self.b, self.emit
        before = b.mul(chunk.place(b, segment), word(16))
        with emit.loop(word(0), word(16), _UNROLLED) as (j, _, _):
            for each in range(_UNROLLED):
                one = b.add(j, word(each))
                self._copy_output(b.add(chunk.output, one), segment, b.add(before, one))

    def _copy_output(self, output: Value, segment: Value, place: Value) -> None:
        b, emit, coding = self.b, self.emit, self.coding
        size = self.segment * coding.bits // 8
        source = b.add(b.mul(output, self.width), b.mul(segment, word(size)))
        source = b.gep(self.codes, [source])
        target = b.gep(self.copied, [b.mul(place, word(self.segment))])
        for at in range(0, size, 64):
            read = emit.read(source, word(at), ir.VectorType(INT8, min(size, 64)), 1)
            if coding.bits == 8:
                emit.write(read, target, word(at), 1)
                continue
            for k, numbers in enumerate(self._numbers_of(read)):
                emit.write(numbers, target, word(at + k * size), 1)
        group = b.sdiv(b.mul(segment, word(self.segment)), word(coding.group))
        scale, zero = self.scale_and_zero(output, group)
        emit.write(scale, self.of_scales, place, 4)
        if zero is not None:
            emit.write(zero, self.of_zeros, place, 4)

    def _numbers_of(self, pairs: Value) -> list[Value]:
        """Returns code - 8, or twice the number of e2m1, of the low and of the high halves."""
        b, emit = self.b, self.emit
        if not self.coding.fp4:  # three bits as they are, and the fourth, inverted, as the sign
            rows = [[8] * 5 + [4, 2, 1], [128] * 5 + [64, 32, 16]]
            return [emit.affine(pairs, each, 0xF8) for each in rows]
        numbers = [int(2 * each) for each in FP4]
        low, four = (ir.Constant(pairs.type, [by] * pairs.type.count) for by in (15, 4))
        return [
            emit.looked_up_bytes([*numbers, *(-each for each in numbers)], codes)
            for codes in (b.and_(pairs, low), b.and_(b.lshr(pairs, four), low))
        ]

    def _multiply_tiles(self, chunk: _Chunk, tile: Value, segment: Value, many: int) -> None:
        """Writes the products of a tile of rows with the codes of some segments."""
        b, emit, turn = self.b, self.emit, 0
        mine = chunk.place(b, segment)
        at = b.add(b.mul(tile, self.segments), segment)
        size, signed = 16 * self.segment, self.coding.bits == 4 or self.coding.signed
        codes = b.gep(self.copied, [b.mul(mine, word(size))])
        digits = b.gep(self.digits, [b.mul(at, word(size))])
        products = b.gep(self._products_of(tile, b.sub(segment, chunk.begin)), [word(0)])
        products = b.bitcast(products, _BYTE)
        for i in range(many):
            emit.amx("tilezero", _C[i])
        for k in range(self.segment // self.depth):
            for i in range(many):  # so that no product waits for the one before
                code, digit = _A[turn % 2], _B[turn % 2]
                place = b.gep(codes, [word(i * size + 64 * k)])
                emit.amx("tileloadd64", code, place, word(self.segment))
                place = b.gep(digits, [word(i * size + 1024 * k)])
                emit.amx("tileloadd64", digit, place, word(64))
                emit.amx("tdpbssd" if signed else "tdpbusd", _C[i], code, digit)
                turn += 1
        for i in range(many):
            emit.amx("tilestored64", _C[i], b.gep(products, [word(1024 * i)]), word(64))

    def _products_of(self, tile: Value, number: Value) -> Value:
        """Returns the address of the products of a tile of rows and a segment of a chunk."""
        b = self.b
        at = b.add(b.mul(tile, word(self.chunk)), number)
        return b.gep(self.products, [b.mul(at, word(256))])

    def _add(self, chunk: _Chunk, tile: Value, ahead: _Chunk) -> None:
        """Adds the products of a chunk to the totals of a tile of rows.

        Meanwhile the codes of the chunk `ahead` are prefetched.
        """
        b, emit = self.b, self.emit
        totals = b.gep(self.totals, [b.mul(tile, word(256))])
        fresh = b.icmp_signed("==", chunk.begin, word(0))
        before = [
            b.select(fresh, zeros(_VECTOR), emit.read(totals, word(16 * j), _VECTOR, 4))
            for j in range(16)
        ]
        with emit.loop(chunk.begin, chunk.end, 1, before) as (segment, now, following):
            mine = chunk.place(b, segment)
            at = b.mul(b.add(b.mul(tile, self.segments), segment), word(16))
            steps = emit.read(self.steps, at, _VECTOR, 4)
            sums = emit.read(self.sums, at, _VECTOR, 4)
            place = b.mul(mine, word(16))
            products = self._products_of(tile, b.sub(segment, chunk.begin))
            size = self.segment * self.coding.bits // 8
            base, stride = self._ahead(chunk, ahead, segment, size)
            for j, total in enumerate(now):
                for at in range(0, size, 64):
                    one = b.add(base, b.add(b.mul(stride, word(j)), word(at)))
                    emit.prefetch(b.gep(self.codes, [one]), level=1)
                product = b.sitofp(emit.read(products, word(16 * j), _WORDS, 4), _VECTOR)
                one = b.add(place, word(j))
                if self.corrects:
                    zero = emit.splat(b.fneg(emit.read(self.of_zeros, one, FLOAT, 4)), 16)
                    product = emit.multiply_add(zero, sums, product)
                scale = emit.splat(emit.read(self.of_scales, one, FLOAT, 4), 16)
                following[j] = emit.multiply_add(product, b.fmul(scale, steps), total)
        for j, total in enumerate(now):
            emit.write(total, totals, word(16 * j), 4)

    def _ahead(
        self, chunk: _Chunk, ahead: _Chunk, segment: Value, size: int
    ) -> tuple[Value, Value]:
        """Returns the place of 16 rows of codes that are prefetched, and their distance.

        They are those of the chunk `ahead`.  Small blocks of 16 outputs are prefetched a block
        before they are copied, in the order of memory.
        """
        b = self.b
        small = b.icmp_signed("<=", b.mul(self.width, word(16)), word(_SMALL))
        block = b.mul(b.add(chunk.output, word(16)), self.width)
        block = b.add(block, b.mul(segment, word(16 * size)))
        mine = b.mul(b.add(ahead.begin, b.sub(segment, chunk.begin)), word(size))
        mine = b.add(b.mul(ahead.output, self.width), mine)
        return b.select(small, block, mine), b.select(small, word(size), self.width)

    def _finish(self, first: Value, tile: Value, row: Value, many: int) -> None:
        """Adds the digits of each row."""
        b, emit = self.b, self.emit
        totals = b.gep(self.totals, [b.mul(tile, word(256))])
        with emit.loop(word(0), word(16), 1) as (j, _, _):
            total = emit.read(totals, b.mul(j, word(16)), _VECTOR, 4)
            low, middle, high = (
                emit.lanes(total, [(d * _ROWS + i) % 16 for i in range(8)]) for d in range(_DIGITS)
            )
            total = b.fadd(high, b.fadd(middle, low))
            for r in range(many):
                place = b.add(b.mul(b.add(row, word(r)), self.outputs), b.add(first, j))
                emit.write(b.extract_element(total, ir.Constant(INT32, r)), self.y, place, 4)
