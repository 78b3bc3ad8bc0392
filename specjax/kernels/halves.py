"""Products of few rows with a matrix [in, out], as sums of the products with its two halves.

The rows of a half lie side by side in memory.  On some processors two threads are faster if each
reads one half than if each reads half of every row (`Machine.halves`).  The parts that multiply the
first half come first; the parts of the second half wait for them and add both sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Read, Value, word
from specjax.kernels.forms import Operands
from specjax.kernels.sharing import wait_for


class Which(NamedTuple):
    """Which share of the columns of which half a part multiplies."""

    second: Value  # whether it is of the second half
    share: Value
    shares: Value


def pairs(emit: Emitter, parts: Value) -> Value:
    """Returns the least even number that is not below `parts`."""
    return emit.whole(emit.b.add(parts, word(1)), 2)


def which(emit: Emitter, part: Value, parts: Value) -> Which:
    """Returns what a part does, of an even number of parts."""
    b, shares = emit.b, emit.b.sdiv(parts, word(2))
    second = b.icmp_signed(">=", part, shares)
    return Which(second, b.select(second, b.sub(part, shares), part), shares)


@dataclasses.dataclass(frozen=True)
class Halved:
    """The columns of a share of a product.

    Attributes:
      multiply: what `loops` returns.
      of: the operands of the whole product.
      first, last: the first column, and the one after the last.
    """

    multiply: ir.Function
    of: Operands
    first: Value
    last: Value


def multiply_half(
    emit: Emitter, each: Sequence[Halved], part: Which, done: Value, before: Value, lanes: int
) -> None:
    """Writes the sums over one half, of products with the same rows.

    Args:
      emit: writes the instructions.
      each: the products.
      part: what the part does of each.
      done: the address of the number of parts that are done.
      before: the parts before the first half.
      lanes: of the vectors that are added.
    """
    b = emit.b
    with b.if_else(part.second) as (second, first):
        with first:
            for product in each:
                y = b.gep(product.of.y, [product.first])
                _multiply(emit, product, part.second, y, product.of.count)
        with second:
            held = []
            for product in each:
                width = b.sub(product.last, product.first)
                size = b.mul(b.mul(product.of.rows, width), word(4))
                taken = b.call(emit.c("malloc"), [size])
                held.append((taken, b.bitcast(taken, FLOAT.as_pointer()), width))
                _multiply(emit, product, part.second, *held[-1][1:])
            wait_for(emit, done, b.add(before, part.shares))
            for product, (taken, sums, width) in zip(each, held, strict=True):
                with emit.loop(word(0), product.of.rows, 1) as (row, _, _):
                    begin = b.add(b.mul(row, product.of.count), product.first)
                    y, more = b.gep(product.of.y, [begin]), b.gep(sums, [b.mul(row, width)])

                    def add(i: Value, read: Read, y: Value = y, more: Value = more) -> None:
                        emit.write(b.fadd(read(y, i), read(more, i)), y, i, 4)

                    emit.each(word(0), width, lanes, add)
                b.call(emit.c("free"), [taken])


def _multiply(emit: Emitter, product: Halved, second: Value, y: Value, pitch: Value) -> None:
    """Writes the sums of a share to y [rows, pitch], from its first column on."""
    b, of = emit.b, product.of
    middle = b.sdiv(of.inner, word(2))
    start = b.select(second, middle, word(0))
    depth = b.select(second, b.sub(of.inner, middle), middle)
    w = b.gep(of.w, [b.add(b.mul(start, of.stride), product.first)])
    columns = word(0), b.sub(product.last, product.first)
    sizes = of.rows, depth, of.inner, of.stride, pitch
    b.call(product.multiply, [b.gep(of.x, [start]), w, y, *columns, *sizes])
