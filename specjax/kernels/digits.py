"""The product of `codes.py` for processors with VNNI, if all inputs of an output share a scale.

    x[m, i] = step[m] * (d2 * 256^2 + d1 * 256 + d0),    digits d of one byte with a sign

`step` is the largest absolute value of a row over 2^23, about, so three digits are as exact as
float32 (see `tiles.py`).  With one digit, `step` is that value over 127, and a row is rounded to
int8.  The products of a digit with the codes are summed in whole numbers, four bytes in one lane.
A code needs no conversion, and an instruction has four times as many products as one of float32.
Bytes are multiplied by VNNI, which takes one side without a sign: 128 is added to codes with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.codes import Beside, Codes
from specjax.kernels.coding import DIGIT_STEP
from specjax.kernels.emitting import FLOAT, INT8, INT32, Emitter, Value, word, zeros

_SMALLEST = 2.0**-126
"""The least step of three digits: a smaller one would be rounded, and digits exceed a byte."""

_LANES = 16
_BYTES = 4 * _LANES  # of a vector
_SIGN = 128
_OUTPUTS, _ROWS = 4, {1: 4, 3: 2}
"""The outputs that are multiplied at once, and the rows by their digits: each pair has a register
for the sums of a digit."""


class Digits(Codes):
    """The `sharing.Work` as `Codes`."""

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        if self.coding.digits == 1:  # a part multiplies little for the rows that it rounds anew
            return emit.least(threads, worth)
        return super().parts(emit, sizes, threads, worth)

    def write_part(self, function: ir.Function) -> None:
        _Part(self, function).write_all()


class MadeDigits(Beside):
    """A part of a product that makes the digits of all rows anew.

    A subclass sets `steps`, the address of memory for the step of each row.
    """

    steps: Value

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        self.count = self.coding.digits
        # The largest absolute value of the digits, about: the highest one is at most 127.
        self.largest = 127 * 2 ** (8 * (self.count - 1))
        self.vector, self.words = ir.VectorType(FLOAT, _LANES), ir.VectorType(INT32, _LANES)
        self.bytes = ir.VectorType(INT8, _BYTES)

    def write_step(self, row: Value) -> Value:
        """Writes the step of a row; returns what its numbers are multiplied with, or divided by if
        there is one digit."""
        b, emit = self.b, self.emit
        over = ir.Constant(FLOAT, 1 / self.largest)
        step = b.fmul(emit.largest_size(self.of_row(row), self.inner, _LANES), over)
        if self.count == 1:  # as in XLA's products, only a row of zeros has another step
            small, least = b.fcmp_ordered("==", step, zeros(FLOAT)), 1.0
        else:
            small, least = b.fcmp_ordered("<", step, ir.Constant(FLOAT, _SMALLEST)), _SMALLEST
        step = b.select(small, ir.Constant(FLOAT, least), step)
        emit.write(step, self.steps, row, 4)
        if self.count > 1:  # a product is as exact with the inverse
            step = b.fdiv(ir.Constant(FLOAT, 1.0), step)
        return emit.splat(step, _LANES)

    def of_row(self, row: Value) -> Value:
        """Returns the address of the activations of a row."""
        return self.b.gep(self.x, [self.b.mul(row, self.inner)])

    def digits_of(self, x: Value, at: Value, step: Value) -> Value:
        """Returns the digits of 16 numbers, as words: word 4 i + d has digit d of numbers 4 i to
        4 i + 3, and words behind the last digit mean nothing."""
        b, emit = self.b, self.emit
        numbers = emit.read(x, at, self.vector, 4)
        many = (b.fmul if self.count > 1 else b.fdiv)(numbers, step)
        whole = b.fptosi(emit.rounded(many), self.words)
        if self.count > 1:
            # Each byte but the highest lends 1 to the next one if it exceeds 127.
            half = ir.Constant(self.words, [int.from_bytes([_SIGN] * self.count)] * _LANES)
            whole = b.xor(b.add(whole, half), half)
        order = [16 * i + 4 * k + d for i in range(4) for d in range(4) for k in range(4)]
        return b.bitcast(emit.lanes(b.bitcast(whole, self.bytes), order), self.words)

    def joined(self, digits: Sequence[Value]) -> Value:
        """Returns numbers in float32 from the whole numbers of their digits, the lowest first."""
        kind = ir.VectorType(FLOAT, digits[0].type.count)
        *lower, made = (self.b.sitofp(each, kind) for each in digits)
        for each in reversed(lower):
            made = self.emit.multiply_add(made, self.emit.constant(256.0, kind.count), each)
        return made


class _Part(MadeDigits):
    """Writes the instructions of one part."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        b: Any = self.b
        # Codes are multiplied without a sign, so this was added to each number.
        self.added = self.coding.offset + (_SIGN if self.coding.signed else 0)
        numbers = b.mul(self.rows, word(self.count))
        taken, steps = b.mul(numbers, word(_BYTES)), b.mul(self.rows, word(4))
        sizes = taken, b.mul(numbers, self.inner), steps
        self.held, (taken, self.digits, steps) = self.emit.memory(*sizes)
        self.taken = b.bitcast(taken, INT32.as_pointer())
        self.steps = b.bitcast(steps, FLOAT.as_pointer())

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.rows, 1) as (row, _, _):
            first = b.mul(row, word(self.count))
            for d, total in enumerate(self._write_digits(row)):
                less = b.mul(total, ir.Constant(self.words, [-self.added] * _LANES))
                emit.write(less, self.taken, self._row(first, d, word(_LANES)), 4)
        emit.tiles(self.first, self.last, _OUTPUTS, self.rows, _ROWS[self.count], self._tile)
        b.call(emit.c("free"), [self.held])
        b.ret_void()

    def _write_digits(self, row: Value) -> list[Value]:
        """Writes the digits and the step of a row; returns a vector for each digit, which adds up
        to the sum of its values."""
        b, emit = self.b, self.emit
        x, step = self.of_row(row), self.write_step(row)
        first = b.mul(row, word(self.count))
        places = [b.gep(self.digits, [self._row(first, d, self.inner)]) for d in range(self.count)]
        whole = emit.whole(self.inner, _BYTES)
        sums = [zeros(self.words)] * self.count
        ones = ir.Constant(self.bytes, [1] * _BYTES)
        for low, high, size in ((word(0), whole, _BYTES), (whole, self.inner, DIGIT_STEP)):
            with emit.loop(low, high, size, sums) as (at, now, following):
                made = [
                    self.digits_of(x, b.add(at, word(i)), step) for i in range(0, size, _LANES)
                ]
                for d in range(self.count):
                    mine = emit.joined([emit.lanes(each, range(d, _LANES, 4)) for each in made])
                    digits = b.bitcast(mine, ir.VectorType(INT8, size))
                    emit.write(digits, places[d], at, 1)
                    following[d] = emit.add_products(ones, emit.padded(digits, _BYTES), now[d])
            sums = now
        return sums

    def _row(self, first: Value, digit: int, size: Value) -> Value:
        """Returns where a digit of a row lies, if the numbers of one take `size`."""
        return self.b.mul(self.b.add(first, word(digit)), size)

    def _tile(self, i: Value, outputs: int, m: Value, rows: int) -> None:
        """Computes the products of some rows with some outputs."""
        b, emit = self.b, self.emit
        columns, mine = (
            [b.add(at, word(j)) for j in range(n)] for at, n in ((i, outputs), (m, rows))
        )
        codes = [b.gep(self.codes, [b.mul(j, self.inner)]) for j in columns]
        firsts = [b.mul(row, word(self.count)) for row in mine]
        each = [(first, d) for first in firsts for d in range(self.count)]
        digits = [b.gep(self.digits, [self._row(*one, self.inner)]) for one in each]
        begin = [emit.read(self.taken, self._row(*one, word(_LANES)), self.words, 4) for one in each]
        pairs = [(r, c) for r in range(rows) for c in range(outputs)]
        ahead = b.mul(self.inner, word(outputs))
        sums = [start for start in begin for _ in columns]
        whole, sign = emit.whole(self.inner, _BYTES), ir.Constant(self.bytes, [_SIGN] * _BYTES)
        for low, high, size in ((word(0), whole, _BYTES), (whole, self.inner, DIGIT_STEP)):
            with emit.loop(low, high, size, sums) as (at, now, following):
                read = []
                for column in codes:
                    emit.prefetch(b.gep(column, [b.add(at, ahead)]))
                    code = emit.read_bytes(column, at, size, _BYTES)
                    read.append(b.xor(code, sign) if self.coding.signed else code)
                for r, row in enumerate(digits):
                    digit = emit.read_bytes(row, at, size, _BYTES)
                    for c, code in enumerate(read):
                        k = r * outputs + c
                        following[k] = emit.add_products(code, digit, now[k])
            sums = now
        # For each digit, its sums of products for each row and output.
        totals = [
            emit.packed_sums([sums[(r * self.count + d) * outputs + c] for r, c in pairs])
            for d in range(self.count)
        ]
        found = self.joined(totals)
        scales = self.scales_of(i, outputs)
        for r, row in enumerate(mine):
            step = emit.read(self.steps, row, FLOAT, 4)
            total = emit.lanes(found, range(r * outputs, (r + 1) * outputs))
            product = b.fmul(b.fmul(total, emit.splat(step, outputs)), scales)
            emit.write(product, self.y, b.add(b.mul(row, self.outputs), i), 4)
