"""A product of few rows with a matrix, or with one of a stack, as parts of its columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import INT32, WORD, Emitter, Value, word
from specjax.kernels.forms import Form, Machine
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
        (piece,) = self.pieces
        multiply = piece.declare(module)
        arguments: Any = multiply.args[:3]
        places = [each.type.pointee for each in arguments]
        if self.stacked:
            places.insert(2, INT32)
        function = part_of(module, self.name, places, 7)
        emit = Emitter(function)
        b = emit.b
        x, w, *chosen, y, part, parts, rows, tokens, inner, stride, count = function.args
        for number in chosen:
            w = b.gep(w, [b.mul(b.sext(b.load(number), WORD), b.mul(inner, stride))])
        first, last = share_of(emit, count, part, parts)
        every = b.mul(rows, tokens)
        b.call(multiply, [x, w, y, first, last, every, inner, stride, count])
        b.ret_void()
        return function


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
