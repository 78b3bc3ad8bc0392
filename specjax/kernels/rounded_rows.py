"""The product of few rows with an int8 matrix, which rounds the rows to int8 itself.

    y[m, o] = sum over i of q[m, i] * w[o, i] * step[m] * scale[o]
    q[m, i] = round(x[m, i] / step[m]),    step[m] = max over i of |x[m, i]| / 127

The sum is exact, so its bits are those of any other order.  Bytes are multiplied by VNNI, which
takes one side without a sign: 128 is added to the weights, and taken from the sum with a row's q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.columns import share_of
from specjax.kernels.emitting import FLOAT, INT8, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.pieces import Piece

EACH = 16
"""The inputs of a matrix are a multiple of it."""

_LANES = 16
_BYTES = 4 * _LANES  # of a vector
_SIGN = 128
_LARGEST = 127
_OUTPUTS, _ROWS = 4, 4  # that are multiplied at once


@dataclasses.dataclass(frozen=True)
class RoundedRows:
    """The `sharing.Work` of y [rows, tokens, outputs].

    Its buffers are x [rows, tokens, inner] in float32, w [outputs, inner] in int8, scale [outputs]
    in float32, and y in float32.  Each part rounds the rows anew.
    """

    name = "rounded_rows"
    buffers = 4
    sizes = ((0, 0), (0, 1), (0, 2), (1, 0))

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        rows, tokens, inner, outputs = sizes
        return emit.b.mul(emit.b.mul(inner, outputs), emit.b.mul(rows, tokens))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return emit.least(threads, worth)

    @property
    def pieces(self) -> Sequence[Piece]:
        def write(function: ir.Function) -> None:
            _Part(function).write_all()

        places = [kind.as_pointer() for kind in (FLOAT, INT8, FLOAT, FLOAT)]
        return (Piece(f"specjax_{self.name}_part", (*places, *[WORD] * 6), self.buffers, write),)

    def function(self, module: ir.Module) -> ir.Function:
        return self.pieces[0].declare(module)


class _Part:
    """Writes the instructions of one part."""

    def __init__(self, function: ir.Function) -> None:
        self.emit = Emitter(function)
        b: Any = self.emit.b
        self.b = b
        self.x, self.weights, self.scales, self.y, *numbers = function.args
        part, parts, rows, tokens, self.inner, self.outputs = numbers
        self.rows = b.mul(rows, tokens)
        self.first, self.last = share_of(self.emit, self.outputs, part, parts)
        self.vector, self.words = ir.VectorType(FLOAT, _LANES), ir.VectorType(INT32, _LANES)
        self.bytes = ir.VectorType(INT8, _BYTES)
        digits = b.mul(self.rows, self.inner)
        each = b.mul(self.rows, word(4))
        size = b.add(digits, b.mul(each, word(2)))
        self.held = b.call(self.emit.c("malloc"), [size])
        self.digits = self.held
        self.steps = b.bitcast(b.gep(self.held, [digits]), FLOAT.as_pointer())
        self.taken = b.bitcast(b.gep(self.held, [b.add(digits, each)]), INT32.as_pointer())

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.rows, 1) as (row, _, _):
            self._round(row)
        many = b.add(self.first, emit.whole(b.sub(self.last, self.first), _OUTPUTS))
        groups = emit.groups(self.rows, _ROWS)
        for low, high, outputs in ((self.first, many, _OUTPUTS), (many, self.last, 1)):
            with emit.loop(low, high, outputs) as (i, _, _):
                for group in groups:
                    with emit.loop(*group) as (m, _, _):
                        self._tile(i, outputs, m, group[2])
        b.call(emit.c("free"), [self.held])
        b.ret_void()

    def _round(self, row: Value) -> None:
        """Writes the digits of a row, its step, and what is taken from its sums."""
        b, emit = self.b, self.emit
        x = b.gep(self.x, [b.mul(row, self.inner)])
        largest = emit.largest_size(x, self.inner, _LANES)
        step = b.fmul(largest, ir.Constant(FLOAT, 1 / _LARGEST))
        none = b.fcmp_ordered("==", step, zeros(FLOAT))
        step = b.select(none, ir.Constant(FLOAT, 1.0), step)
        spread, digits = emit.splat(step, _LANES), b.gep(self.digits, [b.mul(row, self.inner)])
        with emit.loop(word(0), self.inner, _LANES, [zeros(self.words)]) as (i, now, following):
            quotient = b.fdiv(emit.read(x, i, self.vector, 4), spread)
            digit = b.fptosi(emit.rounded(quotient), self.words)
            emit.write(b.trunc(digit, ir.VectorType(INT8, _LANES)), digits, i, 1)
            following[0] = b.add(now[0], digit)
        emit.write(step, self.steps, row, 4)
        taken = b.mul(emit.sum(now[0]), ir.Constant(INT32, -_SIGN))
        emit.write(taken, self.taken, row, 4)

    def _tile(self, i: Value, outputs: int, m: Value, rows: int) -> None:
        """Computes the products of some rows with some outputs."""
        b, emit = self.b, self.emit
        columns, mine = (
            [b.add(at, word(j)) for j in range(n)] for at, n in ((i, outputs), (m, rows))
        )
        weights = [b.gep(self.weights, [b.mul(j, self.inner)]) for j in columns]
        digits = [b.gep(self.digits, [b.mul(j, self.inner)]) for j in mine]
        ahead = b.mul(self.inner, word(outputs))
        whole, sums = emit.whole(self.inner, _BYTES), [zeros(self.words)] * (rows * outputs)
        for low, high, size in ((word(0), whole, _BYTES), (whole, self.inner, EACH)):
            with emit.loop(low, high, size, sums) as (at, now, following):
                read = [emit.read_bytes(row, at, size, _BYTES) for row in digits]
                for c, column in enumerate(weights):
                    emit.prefetch(b.gep(column, [b.add(at, ahead)]))
                    high_bits = ir.Constant(self.bytes, [_SIGN] * _BYTES)
                    unsigned = b.xor(emit.read_bytes(column, at, size, _BYTES), high_bits)
                    for r, row in enumerate(read):
                        k = r * outputs + c
                        following[k] = emit.add_products(unsigned, row, now[k])
            sums = now
        totals = emit.each_sum(sums)
        for r, row in enumerate(mine):
            taken, step = (
                emit.read(of, row, kind, 4)
                for of, kind in ((self.taken, INT32), (self.steps, FLOAT))
            )
            for c, column in enumerate(columns):
                total = b.sitofp(b.add(totals[r * outputs + c], taken), FLOAT)
                product = b.fmul(b.fmul(total, step), emit.read(self.scales, column, FLOAT, 4))
                emit.write(product, self.y, b.add(b.mul(row, self.outputs), column), 4)
