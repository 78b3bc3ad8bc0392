"""A product of few rows with a matrix, or with one of a stack, as parts of its columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import INT32, WORD, Emitter, Value, word
from specjax.kernels.forms import Form, Machine, Operands
from specjax.kernels.halves import Halved, multiply_half, pairs, which
from specjax.kernels.loops import loops
from specjax.kernels.pieces import Piece
from specjax.kernels.sharing import part_of

_SHARES = 2
"""Parts for each thread, so that a thread that begins late does less."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The `sharing.Work` of y [rows, tokens, count] = x [rows, tokens, inner] @ the matrix.

    If `stacked` is set, a buffer after the stack [E, ...] of matrices has the number of the one
    that is meant.
    """

    form: Form
    machine: Machine
    stacked: bool = False

    @property
    def buffers(self) -> int:
        return 4 if self.stacked else 3

    @property
    def name(self) -> str:
        return f"{self.form.name}_of_a_stack" if self.stacked else self.form.name

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Returns the sizes of rows, tokens, inner, stride and count."""
        stride = (1 if self.form.by_columns else 0) + self.stacked
        return (0, 0), (0, 1), (0, 2), (1, stride), (self.buffers - 1, 2)

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        rows, tokens, inner, _, count = sizes
        return emit.b.mul(emit.b.mul(inner, count), emit.b.mul(rows, tokens))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return emit.least(emit.b.mul(threads, word(_SHARES)), worth)

    @property
    def pieces(self) -> Sequence[Piece]:
        return (loops(self.form, self.machine),)

    def function(self, module: ir.Module) -> ir.Function:
        function, multiply = self._begun(module)
        emit = Emitter(function)
        of, part, parts, _ = self._operands(emit)
        share = share_of(emit, of.count, part, parts)
        sizes = of.rows, of.depth, of.inner, of.stride, of.count
        emit.b.call(multiply, [of.x, of.w, of.y, *share, *sizes])
        emit.b.ret_void()
        return function

    def _begun(
        self, module: ir.Module, addresses: Sequence[ir.Type] = (), words: int = 0
    ) -> tuple[ir.Function, ir.Function]:
        """Declares the loops and the function of a part, which gets more before its part."""
        (piece,) = self.pieces
        multiply = piece.declare(module)
        arguments: Any = multiply.args[:3]
        places = [each.type.pointee for each in arguments]
        if self.stacked:
            places.insert(2, INT32)
        return part_of(module, self.name, [*places, *addresses], 7 + words), multiply

    def _operands(self, emit: Emitter) -> tuple[Operands, Value, Value, Sequence[Value]]:
        """Returns the operands of the product, the part, how many there are, and what is more."""
        b = emit.b
        x, w, *chosen = b.function.args[: self.buffers - 1]
        y, *others, part, parts, rows, tokens, inner, stride, count = b.function.args[
            self.buffers - 1 :
        ]
        for number in chosen:
            w = b.gep(w, [b.mul(b.sext(b.load(number), WORD), b.mul(inner, stride))])
        of = Operands(x, w, y, b.mul(rows, tokens), inner, inner, stride, count)
        return of, part, parts, others


@dataclasses.dataclass(frozen=True)
class HalvedProduct(Product):
    """The same as a `sharing.Phased` work, for a matrix [in, out]; see `halves.py`."""

    results = 1
    each = 0, 0

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return pairs(emit, emit.least(threads, worth))

    def function(self, module: ir.Module) -> ir.Function:
        function, multiply = self._begun(module, [WORD, WORD], 1)
        emit = Emitter(function)
        of, part, parts, (done, *_) = self._operands(emit)
        mine = which(emit, part, parts)
        share = share_of(emit, of.count, mine.share, mine.shares)
        each = [Halved(multiply, of, *share)]
        multiply_half(emit, each, mine, done, word(0), self.machine.lanes)
        emit.b.ret_void()
        return function


def product_of(form: Form, machine: Machine, stacked: bool = False) -> Product:
    """Returns the work of a product on this machine."""
    halved = form.by_columns and machine.halves == 2
    return (HalvedProduct if halved else Product)(form, machine, stacked)


def share_of(emit: Emitter, count: Value, part: Value, parts: Value) -> tuple[Value, Value]:
    """Returns the first column of a part, and the one after its last.

    Parts begin at multiples of 16 columns, so that no two write to one line of the cache.
    """
    b = emit.b
    following = b.add(part, word(1))
    first, last = (
        emit.least(emit.whole(b.sdiv(b.mul(count, i), parts), 16), count) for i in (part, following)
    )
    return first, b.select(b.icmp_signed("==", following, parts), count, last)
