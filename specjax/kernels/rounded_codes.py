"""The product of `codes.py` in whole numbers, with activations that are rounded to 8 bits.

    y[m, o] = sum over groups g of scale[o, g] * step[m, g] * sum over i in g of q[m, i] * c[o, i]
    q[m, i] = round(x[m, i] / step[m, g]),    step[m, g] = max over i in g of |x[m, i]| / 127

c[o, i] is a code less its zero.  The groups of the activations are those of the codes, and have at
most 128 inputs.  A processor multiplies bytes with a sign by bytes without one and adds four
neighbours (VNNI), or takes two instructions (AVX2).  So the codes are multiplied without a sign,
and what should have been subtracted from them is taken from the sum of a group's q.  The sum of a
group is exact, and those of the groups are added in an order that depends on the matrix alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from specjax.kernels.codes import FP4, Beside, Codes, constant_of
from specjax.kernels.coding import ALL, Coding
from specjax.kernels.emitting import FLOAT, INT8, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.orders import AHEAD, apart

_LARGEST = 127
"""The largest q."""

_BYTE = INT8.as_pointer()


@dataclasses.dataclass(frozen=True)
class RoundedCodes(Codes):
    """The `sharing.Work` as `Codes`."""

    vnni: bool = True  # else AVX2

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        """Returns one part for a single thread, since each part rounds the activations anew."""
        alone = emit.b.icmp_signed("==", threads, word(1))
        return emit.b.select(alone, word(1), super().parts(emit, sizes, threads, worth))

    def write_part(self, function: ir.Function) -> None:
        _Part(self, function).write_all()


class _Row(NamedTuple):
    """What a block of a row of activations has become."""

    digits: Sequence[Value]  # vectors of q, in the order of the codes
    steps: Value
    taken: Value  # in whole numbers, what is taken from the products
    sums: Value | None  # of q, in float32


class _Part(Beside):
    """Writes the instructions of one part."""

    def __init__(self, work: RoundedCodes, function: ir.Function) -> None:
        super().__init__(work, function)
        coding, lanes = self.coding, self.coding.lanes
        self.vnni, self.lanes = work.vnni, lanes
        self.vector, self.words = ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
        self.bytes = ir.VectorType(INT8, 4 * lanes)
        self.rest, self.moved = 0, _moved(coding)
        self.block = coding.rounded_block
        self.count = self.block // coding.rounded  # groups of activations in a block
        b = self.b
        self.blocks = b.sdiv(self.inner, word(self.block))
        each = b.mul(self.rows, self.blocks)
        pieces = [
            b.mul(self.rows, self.inner),  # digits
            b.mul(each, word(4 * lanes)),  # what is taken from the products
            b.mul(each, word(4 * lanes if self.zeros is not None else 0)),  # sums
            b.mul(each, word(4 * self.count)),  # steps
        ]
        ends: list[Value] = [word(64)]
        for piece in pieces:
            ends.append(b.add(ends[-1], piece))
        self.held = b.call(self.emit.c("malloc"), [ends[-1]])
        address = self.emit.whole(b.ptrtoint(self.held, WORD), 64)
        places = [b.inttoptr(b.add(address, end), _BYTE) for end in ends[:-1]]
        self.digits = places[0]
        self.taken = b.bitcast(places[1], INT32.as_pointer())
        self.sums, self.steps = (b.bitcast(place, FLOAT.as_pointer()) for place in places[2:])

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        with emit.loop(word(0), b.mul(self.rows, self.blocks), 1) as (block, _, _):
            self._round(block)
        # With one row more outputs at once are more streams from memory.
        one = b.icmp_signed("<=", self.rows, word(1))
        middle = b.select(one, self.last, self.first)
        emit.tiles(self.first, middle, 4, self.rows, 1, self._tile)
        few = self.machine.registers < 32
        outputs, rows = (4, 2) if few else (5, 3) if self.coding.bits == 4 else (4, 4)
        emit.tiles(middle, self.last, outputs, self.rows, rows, self._tile)
        b.call(emit.c("free"), [self.held])
        b.ret_void()

    def _round(self, block: Value) -> None:
        """Writes the digits of a block of a row, its steps, and the sums of its digits."""
        b, emit, lanes = self.b, self.emit, self.lanes
        start = b.mul(block, word(self.block))
        each = self.coding.rounded // lanes  # vectors of a group
        digits: list[Value] = []
        for group in range(self.count):
            read = [
                emit.read(self.x, b.add(start, word((group * each + j) * lanes)), self.vector, 4)
                for j in range(each)
            ]
            step = self._step(read)
            place = b.add(b.mul(block, word(self.count)), word(group))
            emit.write(step, self.steps, place, 4)
            spread = emit.splat(step, lanes)
            digits += [b.fptosi(emit.rounded(b.fdiv(row, spread)), self.words) for row in read]
        small = [b.trunc(digit, ir.VectorType(INT8, lanes)) for digit in digits]
        ordered = self._ordered(small)
        for j, vector in enumerate(ordered):
            emit.write(vector, self.digits, b.add(start, word(j * 4 * lanes)), 1)
        ones = ir.Constant(self.bytes, [1] * (4 * lanes))
        sums = self._products([(ones, vector) for vector in ordered], zeros(self.words))
        at = b.mul(block, word(lanes))
        factor = ir.Constant(self.words, [-self.moved] * lanes)
        emit.write(b.mul(sums, factor), self.taken, at, 4)
        if self.zeros is not None:
            emit.write(b.sitofp(sums, self.vector), self.sums, at, 4)

    def _step(self, vectors: Sequence[Value]) -> Value:
        """Returns the step of the vectors of a group."""
        most = self.emit.magnitude(vectors)
        return self.b.fmul(most, ir.Constant(FLOAT, 1 / _LARGEST))

    def _ordered(self, vectors: Sequence[Value]) -> list[Value]:
        """Returns bytes in the order of the codes, as vectors of 4 * lanes."""
        emit, many = self.emit, 8 if self.coding.bits == 4 else 4
        ordered = []
        for first in range(0, len(vectors), many):
            whole = self.emit.joined(vectors[first : first + many])
            if self.coding.bits == 8:
                ordered.append(whole)
            else:
                count = whole.type.count
                ordered += [emit.lanes(whole, range(half, count, 2)) for half in (0, 1)]
        return ordered

    def _tile(self, i: Value, outputs: int, m: Value, rows: int) -> None:
        """Computes the products of some rows with some outputs."""
        b, emit = self.b, self.emit
        streams = self.machine.streams
        columns = apart(emit, streams, self.first, self.last, i, outputs)
        codes = [b.gep(self.codes, [b.mul(j, self.width)]) for j in columns]
        firsts = [b.mul(b.add(m, word(j)), self.blocks) for j in range(rows)]
        ahead = b.mul(self.width, word(outputs)) if streams == 1 else word(AHEAD)
        size = self.block * self.coding.bits // 8
        # The one scale of an output is multiplied with the sum.
        alone = [self._beside(j, word(0)) for j in columns if self.coding.group == ALL]
        empty = [zeros(self.vector)] * (rows * outputs)
        with emit.loop(word(0), self.blocks, 1, empty) as (block, now, following):
            place = b.mul(block, word(size))
            group = b.sdiv(b.mul(block, word(self.block)), word(self.coding.group))
            mine = [self._row(b.add(first, block)) for first in firsts]
            for c, code in enumerate(codes):
                at = b.gep(code, [place])
                for line in range(0, size, 64):
                    emit.prefetch(b.gep(at, [b.add(ahead, word(line))]))
                numbers = self._bytes_of(at)
                scale, zero = alone[c] if alone else self._beside(columns[c], group)
                for r, row in enumerate(mine):
                    k = r * outputs + c
                    product = self._products(list(zip(numbers, row.digits, strict=True)), row.taken)
                    product = b.sitofp(product, self.vector)
                    if row.sums is not None:
                        product = emit.multiply_add(b.fneg(zero), row.sums, product)
                    factor = row.steps if alone else b.fmul(scale, row.steps)
                    following[k] = emit.multiply_add(product, factor, now[k])
        if alone:
            now = [b.fmul(total, alone[k % outputs][0]) for k, total in enumerate(now)]
        sums = emit.each_sum(now)
        for r in range(rows):
            place = b.mul(b.add(m, word(r)), self.outputs)
            for c, column in enumerate(columns):
                emit.write(sums[r * outputs + c], self.y, b.add(place, column), 4)

    def _row(self, block: Value) -> _Row:
        b, emit, size = self.b, self.emit, 4 * self.lanes
        start, at = b.mul(block, word(self.block)), b.mul(block, word(self.lanes))
        digits = [
            emit.read(self.digits, b.add(start, word(each)), self.bytes, 1)
            for each in range(0, self.block, size)
        ]
        first = b.mul(block, word(self.count))
        kind = FLOAT if self.count == 1 else ir.VectorType(FLOAT, self.count)
        steps = self._spread(emit.read(self.steps, first, kind, 4))
        sums = None if self.zeros is None else emit.read(self.sums, at, self.vector, 4)
        return _Row(digits, steps, emit.read(self.taken, at, self.words, 4), sums)

    def _beside(self, output: Value, group: Value) -> tuple[Value, Value | None]:
        """Returns the scales and the zeros of the lanes."""
        scale, zero = self.scale_and_zero(output, group, self.count)
        if self.coding.fp4:  # numbers are doubled
            scale = self.b.fmul(scale, constant_of(scale.type, 0.5))
        return self._spread(scale), None if zero is None else self._spread(zero)

    def _spread(self, numbers: Value) -> Value:
        """Returns a vector with the number of each lane's group."""
        if self.count == 1:
            return self.emit.splat(numbers, self.lanes)
        lanes = range(self.lanes)
        return self.emit.lanes(numbers, [lane * self.count // self.lanes for lane in lanes])

    def _bytes_of(self, codes: Value) -> list[Value]:
        """Returns the codes of a block as bytes without a sign."""
        b, emit, size = self.b, self.emit, 4 * self.lanes
        found: list[Value] = []
        low, four, high = (ir.Constant(self.bytes, [by] * size) for by in (15, 4, 128))
        for at in range(0, self.block * self.coding.bits // 8, size):
            read = emit.read(codes, word(at), self.bytes, 1)
            if self.coding.bits == 8:
                found.append(b.xor(read, high) if self.coding.signed else read)
                continue
            halves = [b.and_(read, low), b.and_(b.lshr(read, four), low)]
            if self.coding.fp4:
                halves = [emit.looked_up_bytes(_FP4, half) for half in halves]
            found += halves
        return found

    def _products(self, pairs: Sequence[tuple[Value, Value]], total: Value) -> Value:
        """Adds to each lane the products of its bytes: codes without a sign, q with one."""
        if self.vnni:
            for code, digit in pairs:
                total = self.emit.add_products(code, digit, total)
            return total
        return self.b.add(total, self.emit.products(pairs))


_MOST_FP4 = int(2 * max(FP4))
_FP4 = [_MOST_FP4 + int(2 * number) * sign for sign in (1, -1) for number in FP4]
"""The numbers of e2m1, doubled and moved, so that none is negative."""


def _moved(coding: Coding) -> int:
    """Returns what is subtracted from every code that is multiplied, besides its zero."""
    if coding.fp4:
        return _MOST_FP4
    return coding.offset + (128 if coding.signed else 0)
