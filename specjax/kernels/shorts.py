"""The product of rows that are rounded to int8 with a matrix in int8, without VNNI.

A row is rounded as in `digits.py`, with one digit.  Its numbers have 16 bits each, as processors
without VNNI multiply them, and the products are summed in 32 bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from specjax.kernels.codes import Beside
from specjax.kernels.coding import Coding
from specjax.kernels.digits import Digits, MadeDigits
from specjax.kernels.dots import dots
from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, Emitter, Value, word
from specjax.kernels.forms import FORMS, Operands

_FEW, _TILE = 6, 64
"""More than `_FEW` rows are multiplied with `_TILE` outputs at once, whose sums are still in a
cache when they are scaled.  For fewer rows the matrix is read in long runs.
"""


class Shorts(Digits):
    """The `sharing.Work` as `Digits`, for one digit."""

    def room(self, emit: Emitter, rows: Value, inner: Value) -> Value:
        return emit.room(*_Rows(emit, self.coding, rows, inner).sizes)

    def write_digits(self, function: ir.Function) -> None:
        emit = Emitter(function)
        x, memory, rows, inner = function.args
        made = _Rows(emit, self.coding, rows, inner)
        steps, digits = made.found(memory)
        with emit.loop(word(0), rows, 1) as (row, _, _):
            before = [emit.b.mul(row, inner)]
            made.write(emit.b.gep(x, before), steps, row, emit.b.gep(digits, before))
        emit.b.ret_void()

    def write_products(self, function: ir.Function) -> None:
        of = Beside(self, function)
        emit: Emitter = of.emit
        b: Any = emit.b
        memory = b.bitcast(of.x, INT8.as_pointer())
        steps, digits = _Rows(emit, self.coding, of.rows, of.inner).found(memory)
        sums = b.bitcast(of.y, INT32.as_pointer())  # which become the products
        sizes = of.rows, of.inner, of.inner, of.outputs, of.outputs
        operands = Operands(digits, of.codes, sums, *sizes)
        few = b.icmp_signed("<=", of.rows, word(_FEW))
        at_once = b.select(few, of.outputs, word(_TILE))
        with emit.loop(of.first, of.last, at_once) as (first, _, _):
            last = emit.least(b.add(first, at_once), of.last)
            dots(emit, FORMS["int8"], self.machine, operands, first, last)
            with emit.loop(word(0), of.rows, 1) as (row, _, _):
                step, before = emit.read(steps, row, FLOAT, 4), b.mul(row, of.outputs)

                def scale(start: Value, stop: Value, many: int) -> None:
                    with emit.loop(start, stop, many) as (i, _, _):
                        at = b.add(before, i)
                        total = emit.read(sums, at, ir.VectorType(INT32, many), 4)
                        total = b.sitofp(total, ir.VectorType(FLOAT, many))
                        product = b.fmul(total, emit.splat(step, many))
                        emit.write(b.fmul(product, of.scales_of(i, many)), of.y, at, 4)

                lanes = self.machine.lanes
                middle = b.add(first, emit.whole(b.sub(last, first), lanes))
                scale(first, middle, lanes)
                scale(middle, last, 1)
        b.ret_void()


class _Rows(MadeDigits):
    """Rounded rows [rows, inner]."""

    def __init__(self, emit: Emitter, coding: Coding, rows: Value, inner: Value) -> None:
        super().__init__(emit, coding)
        self.inner = inner
        self.sizes = self.b.mul(rows, word(4)), self.b.mul(self.b.mul(rows, inner), word(2))

    def found(self, memory: Value) -> tuple[Value, Value]:
        """Returns where the steps lie in memory, and the numbers."""
        steps, (digits,) = self.places(memory)
        return steps, self.b.bitcast(digits, INT16.as_pointer())

    def write(self, x: Value, steps: Value, row: Value, to: Value) -> None:
        """Writes a row x, and its step."""
        step = self.write_step(x, self.inner, steps, row)
        many = step.type.count
        with self.emit.loop(word(0), self.inner, many) as (at, _, _):
            numbers = self.b.fdiv(self.emit.read(x, at, self.vector, 4), step)
            whole = self.b.fptosi(self.emit.rounded(numbers), self.words)
            self.emit.write(self.b.trunc(whole, ir.VectorType(INT16, many)), to, at, 2)
