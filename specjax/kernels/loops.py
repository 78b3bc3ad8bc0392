"""The loops of the kernels, for a processor with vectors of `lanes` float32 numbers.

The order in which a number of the result is summed depends only on the matrix, and not on the
number of rows or on the division of the columns into parts.  So these products give a token the
same bits in a pass over one token and in a pass over five.
"""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from specjax.kernels.blocks import block
from specjax.kernels.dots import dots
from specjax.kernels.emitting import WORD, Emitter, Read, Value, word, zeros
from specjax.kernels.forms import FORMS, Form, Machine, Operands
from specjax.kernels.panels import TILE, multiply_panels
from specjax.kernels.pieces import Piece
from specjax.kernels.streaming import FEW, stream, widest
from specjax.kernels.tile_dots import tile_dots

_ROWS = 64
"""Rows of x that are multiplied at once, whose sums of a few columns stay in the L1 cache."""


def loops(form: Form, machine: Machine) -> Piece:
    """Returns f(x, w, y, first, last, rows, depth, inner, stride, count): columns of y = x @ w.

    x is [rows, inner] and y [rows, count].  By columns w is [depth, stride] for the first `depth`
    inputs, else [stride, inner] for all of them.
    """

    def write(function: ir.Function) -> None:
        emit = Emitter(function)
        x, w, y, first, last, *sizes = function.args
        of = Operands(x, w, y, *sizes)
        if form.by_columns:
            _columns(emit, form, machine, of, first, last)
        elif machine.bfloat16_tiles and form == FORMS["bfloat16"]:
            with emit.b.if_else(emit.b.icmp_signed(">=", of.stride, word(16))) as (many, few):
                with many:
                    tile_dots(emit, of, first, last)
                with few:
                    dots(emit, form, machine, of, first, last)
        else:
            dots(emit, form, machine, of, first, last)
        emit.b.ret_void()

    pointers = [kind.as_pointer() for kind in (form.row, form.weight, form.result)]
    return Piece(f"specjax_loops_{form.name}_{machine.name}", (*pointers, *[WORD] * 7), 3, write)


def _columns(
    emit: Emitter, form: Form, machine: Machine, of: Operands, first: Value, last: Value
) -> None:
    """Multiplies equal shares of the rows of x, one after the other; panels take all at once."""
    b = emit.b
    if machine.streams > 1:
        return _few_columns(emit, machine, of, first, last)
    every = b.select(b.icmp_signed(">", of.rows, word(0)), of.rows, word(1))
    shares = b.sdiv(b.add(every, word(_ROWS - 1)), word(_ROWS))
    size = b.sdiv(b.add(every, b.sub(shares, word(1))), shares)
    with emit.loop(word(0), of.rows, size) as (row, _, _):
        x, y = b.gep(of.x, [b.mul(row, of.inner)]), b.gep(of.y, [b.mul(row, of.count)])
        rows = emit.least(b.sub(of.rows, row), size)
        _few_columns(emit, machine, dataclasses.replace(of, x=x, y=y, rows=rows), first, last)


def _few_columns(emit: Emitter, machine: Machine, of: Operands, first: Value, last: Value) -> None:
    """Sums the rows of the matrix in their order, so both loops give the same bits."""
    b = emit.b
    small = b.icmp_signed("<=", of.rows, word(FEW))
    few, more = (
        dataclasses.replace(of, rows=b.select(small, *rows))
        for rows in ((of.rows, word(0)), (word(0), of.rows))
    )
    at_once = b.select(small, word(widest(machine)), word(TILE))
    with emit.loop(first, last, at_once) as (start, _, _):
        end = emit.least(b.add(start, at_once), last)
        stream(emit, machine, few, start, end)
        with emit.loop(word(0), more.rows, 1) as (m, _, _):
            place = b.gep(of.y, [b.mul(m, of.count)])

            def clear(j: Value, read: Read, place: Value = place) -> None:
                emit.write(zeros(read(place, j).type), place, j, 4)

            emit.each(start, end, machine.lanes, clear)
        if machine.streams == 1:
            block(emit, machine, more, start, end)
        else:
            with b.if_then(b.icmp_signed(">", more.rows, word(0))):
                multiply_panels(emit, machine, more, start, end)
