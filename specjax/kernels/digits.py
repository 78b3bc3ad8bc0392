"""The product of `codes.py` for processors with VNNI, if all inputs of an output share a scale.

    x[m, i] = step[m] * (d2 * 256^2 + d1 * 256 + d0),    digits d of one byte with a sign

`step` is the largest absolute value of a row over 2^23, about, so three digits are as exact as
float32 (see `tiles.py`).  With one digit, `step` is that value over 127, and a row is rounded to
int8.  The products of a digit with the codes are summed in whole numbers, four bytes in one lane.
A code needs no conversion, and an instruction has four times as many products as one of float32.
Bytes are multiplied by VNNI, which takes one side without a sign: 128 is added to codes with one.

One function makes the digits of all rows, and another one multiplies them.  So matrices that
multiply the same rows may share the digits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.codes import Beside, Codes
from specjax.kernels.coding import DIGIT_STEP, Coding
from specjax.kernels.emitting import FLOAT, INT8, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.pieces import Piece
from specjax.kernels.sharing import part_of

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

    @property
    def pieces(self) -> Sequence[Piece]:
        """Returns void f(x, memory, rows, inner), which makes the digits of all rows, and the
        function of a part of the products, which gets that memory in the place of x."""
        (part,) = super().pieces
        places = FLOAT.as_pointer(), INT8.as_pointer()
        name = f"{self.name}_{self.machine.name}_digits"
        makes = Piece(name, (*places, WORD, WORD), len(places), self.write_digits)
        return makes, dataclasses.replace(part, write=self.write_products)

    def room(self, emit: Emitter, rows: Value, inner: Value) -> Value:
        """Returns the bytes of memory for the digits of all rows."""
        return emit.room(*Lines(emit, self.coding, rows, inner).sizes)

    def write_digits(self, function: ir.Function) -> None:
        """Writes the function that makes digits."""
        emit = Emitter(function)
        x, memory, rows, inner = function.args
        Lines(emit, self.coding, rows, inner, memory).write(x)
        emit.b.ret_void()

    def write_products(self, function: ir.Function) -> None:
        """Writes the function of a part of the products."""
        _Part(self, function).write_all()

    def function(self, module: ir.Module) -> ir.Function:
        """Builds a part that makes its digits and multiplies them."""
        makes, multiplies = (piece.declare(module) for piece in self.pieces)
        places = [FLOAT, *self.matrix, INT32, FLOAT]
        function = part_of(module, self.name, places, 7)
        emit = Emitter(function)
        b: Any = emit.b
        x, *others = function.args
        rows, tokens, inner = function.args[-5:-2]
        rows = b.mul(rows, tokens)
        memory = b.call(emit.c("malloc"), [self.room(emit, rows, inner)])
        b.call(makes, [x, memory, rows, inner])
        b.call(multiplies, [b.bitcast(memory, FLOAT.as_pointer()), *others])
        b.call(emit.c("free"), [memory])
        b.ret_void()
        return function


class MadeDigits:
    """The digits of all rows, in memory.

    A subclass sets `sizes`, the bytes of its pieces of memory.  The first holds each row's step.
    """

    sizes: Sequence[Value]

    def __init__(self, emit: Emitter, coding: Coding) -> None:
        self.emit, self.offset, self.count = emit, coding.offset, coding.digits
        b: Any = emit.b
        self.b = b
        # The largest absolute value of the digits, about: the highest one is at most 127.
        self.largest = 127 * 2 ** (8 * (self.count - 1))
        self.vector, self.words = ir.VectorType(FLOAT, _LANES), ir.VectorType(INT32, _LANES)
        self.bytes = ir.VectorType(INT8, _BYTES)

    def places(self, memory: Value) -> tuple[Value, list[Value]]:
        """Returns where the steps lie, and the other pieces."""
        steps, *others = self.emit.places(memory, *self.sizes)
        return self.b.bitcast(steps, FLOAT.as_pointer()), others

    def write_step(self, x: Value, inner: Value, steps: Value, row: Value) -> Value:
        """Writes the step of a row x; returns what its numbers are multiplied with, or divided by
        if there is one digit."""
        b, emit = self.b, self.emit
        over = ir.Constant(FLOAT, 1 / self.largest)
        step = b.fmul(emit.largest_size(x, inner, _LANES), over)
        if self.count == 1:  # as in XLA's products, only a row of zeros has another step
            small, least = b.fcmp_ordered("==", step, zeros(FLOAT)), 1.0
        else:
            small, least = b.fcmp_ordered("<", step, ir.Constant(FLOAT, _SMALLEST)), _SMALLEST
        step = b.select(small, ir.Constant(FLOAT, least), step)
        emit.write(step, steps, row, 4)
        if self.count > 1:  # a product is as exact with the inverse
            step = b.fdiv(ir.Constant(FLOAT, 1.0), step)
        return emit.splat(step, _LANES)

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


class Lines(MadeDigits):
    """Digits of bytes in the order of a row's numbers, [rows, count, inner], and what the sums of
    their products begin with, [rows, count, 16] words."""

    def __init__(
        self, emit: Emitter, coding: Coding, rows: Value, inner: Value, memory: Value | None = None
    ) -> None:
        super().__init__(emit, coding)
        b, self.rows, self.inner = self.b, rows, inner
        # VNNI takes codes without a sign, so this much was added to each of them.
        self.added = coding.offset + (_SIGN if coding.signed else 0)
        numbers = b.mul(rows, word(self.count))
        self.sizes = b.mul(rows, word(4)), b.mul(numbers, word(_BYTES)), b.mul(numbers, inner)
        if memory is not None:
            self.steps, (starts, self.digits) = self.places(memory)
            self.starts = b.bitcast(starts, INT32.as_pointer())

    def at(self, row: Value, digit: int, size: Value) -> Value:
        """Returns where a digit of a row lies, if the numbers of one take `size`."""
        b = self.b
        return b.mul(b.add(b.mul(row, word(self.count)), word(digit)), size)

    def write(self, x: Value) -> None:
        """Writes all rows of x."""
        b, emit = self.b, self.emit
        ones = ir.Constant(self.bytes, [1] * _BYTES)
        whole = emit.whole(self.inner, _BYTES)
        spans = (word(0), whole, _BYTES), (whole, self.inner, DIGIT_STEP)
        with emit.loop(word(0), self.rows, 1) as (row, _, _):
            mine = b.gep(x, [b.mul(row, self.inner)])
            step = self.write_step(mine, self.inner, self.steps, row)
            sums = [zeros(self.words)] * self.count
            for low, high, size in spans:
                with emit.loop(low, high, size, sums) as (start, now, following):
                    made = [
                        self.digits_of(mine, b.add(start, word(i)), step)
                        for i in range(0, size, _LANES)
                    ]
                    for d in range(self.count):
                        words = [emit.lanes(each, range(d, _LANES, 4)) for each in made]
                        digits = b.bitcast(emit.joined(words), ir.VectorType(INT8, size))
                        place = b.gep(self.digits, [self.at(row, d, self.inner)])
                        emit.write(digits, place, start, 1)
                        digits = emit.padded(digits, _BYTES)
                        following[d] = emit.add_products(ones, digits, now[d])
                sums = now
            for d, total in enumerate(sums):
                less = b.mul(total, ir.Constant(self.words, [-self.added] * _LANES))
                emit.write(less, self.starts, self.at(row, d, word(_LANES)), 4)


def joined(emit: Emitter, digits: Sequence[Value]) -> Value:
    """Returns numbers in float32 from the whole numbers of their digits, the lowest first."""
    kind = ir.VectorType(FLOAT, digits[0].type.count)
    *lower, made = (emit.b.sitofp(each, kind) for each in digits)
    for each in reversed(lower):
        made = emit.multiply_add(made, emit.constant(256.0, kind.count), each)
    return made


class _Part(Beside):
    """Writes the instructions of one part of the products."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        self.lines = Lines(self.emit, self.coding, self.rows, self.inner, self.x)
        self.count = self.coding.digits

    def write_all(self) -> None:
        rows = _ROWS[self.count]
        self.emit.tiles(self.first, self.last, _OUTPUTS, self.rows, rows, self._tile)
        self.b.ret_void()

    def _tile(self, i: Value, outputs: int, m: Value, rows: int) -> None:
        """Computes the products of some rows with some outputs."""
        b, emit = self.b, self.emit
        columns, mine = (
            [b.add(at, word(j)) for j in range(n)] for at, n in ((i, outputs), (m, rows))
        )
        codes = [b.gep(self.codes, [b.mul(j, self.inner)]) for j in columns]
        lines = self.lines
        each = [(row, d) for row in mine for d in range(self.count)]
        digits = [b.gep(lines.digits, [lines.at(*one, self.inner)]) for one in each]
        sums = [
            emit.read(lines.starts, lines.at(*one, word(_LANES)), lines.words, 4) for one in each
        ]
        pairs = [(r, c) for r in range(rows) for c in range(outputs)]
        ahead = b.mul(self.inner, word(outputs))
        sums = [start for start in sums for _ in columns]
        whole, sign = emit.whole(self.inner, _BYTES), ir.Constant(lines.bytes, [_SIGN] * _BYTES)
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
        found = joined(emit, totals)
        scales = self.scales_of(i, outputs)
        for r, row in enumerate(mine):
            step = emit.read(lines.steps, row, FLOAT, 4)
            total = emit.lanes(found, range(r * outputs, (r + 1) * outputs))
            product = b.fmul(b.fmul(total, emit.splat(step, outputs)), scales)
            emit.write(product, self.y, b.add(b.mul(row, self.outputs), i), 4)
