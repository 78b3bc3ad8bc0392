"""`block`: the product of several rows with a matrix whose columns lie side by side."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Value, word
from specjax.kernels.forms import Machine, Operands

_DEEP = 16
"""Rows of the matrix for which sums stay in registers: more rows are too many addresses at once,
and with fewer the sums are moved too often.
"""

_MANY, _PANEL_DEEP = 24, 64
"""More than `_MANY` rows of x are multiplied panel by panel: `_PANEL_DEEP` rows of a few columns of
the matrix are copied, and then all rows of x pass.
"""

_LINE = 64
"""The bytes of a cache line."""


def block(emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value) -> None:
    """Multiplies many rows of x, for which most of the time goes into multiplying.

    The sums of a group of rows, for a few neighbouring columns, stay in registers while a few
    rows of the matrix pass.  Meanwhile what comes next is prefetched, since the processor does not
    predict it.  These are the next columns of the same rows; for more than `_MANY` rows of x, the
    next rows of the same columns, which are a panel.  Either order adds the same terms to a sum
    one after the other.
    """
    b, lanes = emit.b, machine.lanes
    vector = ir.VectorType(FLOAT, lanes)
    most, wide = 6, (4 if machine.registers >= 32 else 2)
    panel, kind_of_weight = wide * lanes, of.w.type.pointee
    size = 4 if kind_of_weight == FLOAT else 2
    with b.goto_entry_block():
        held = b.alloca(ir.ArrayType(FLOAT, _PANEL_DEEP * panel))
        held.align = 64
        packed = b.bitcast(held, FLOAT.as_pointer())

    def add(
        k: Value, deep: Value, j: Value, vectors: int, kind: ir.Type, m: Value, many: int,
        weights_at: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Adds rows [k, deep) of the matrix, into sums of `many` rows of x from m.

        The sums are those of the columns in `vectors` of `kind`, from column j.  `weights_at` is
        where these columns of row 0 lie, or would, and how far the next row is.
        """
        width = lanes if kind == vector else 1
        mine = [b.add(m, word(i)) for i in range(many)]
        activations = [b.gep(of.x, [b.mul(i, of.inner)]) for i in mine]
        sums = [b.gep(of.y, [b.add(b.mul(i, of.count), j)]) for i in mine]
        places = [(place, word(v * width)) for place in sums for v in range(vectors)]
        before = [emit.read(*place, kind, 4) for place in places]
        with emit.loop(k, deep, 1, before) as (i, totals, following):
            later = b.gep(of.w, [b.add(b.add(b.mul(i, of.stride), j), ahead)])
            for line in range(0, vectors * width, _LINE // size):
                emit.prefetch(b.gep(later, [word(line)]))
            row = b.gep(weights_at[0], [b.mul(i, weights_at[1])])
            length = lanes if kind == vector else None
            weights = [emit.weights(row, word(v * width), length) for v in range(vectors)]
            for r, place in enumerate(activations):
                factor = emit.read(place, i, FLOAT, 4)
                factor = emit.splat(factor, lanes) if kind == vector else factor
                for v, weight in enumerate(weights):
                    at = r * vectors + v
                    following[at] = emit.multiply_add(factor, weight, totals[at])
        for total, place in zip(totals, places, strict=True):
            emit.write(total, *place, 4)

    def copy(k: Value, deep: Value, j: Value) -> None:
        """Copies rows [k, deep) of the panel from column j, in float32, as its lines may share few
        places of the L1 cache.
        """
        with emit.loop(k, deep, 1) as (i, _, _):
            row = b.gep(of.w, [b.add(b.mul(i, of.stride), j)])
            place = b.gep(packed, [b.mul(b.sub(i, k), word(panel))])
            for at in range(0, panel, lanes):
                emit.write(emit.weights(row, word(at), lanes), place, word(at), 4)

    def columns(k: Value, deep: Value, begin: Value, last: Value) -> None:
        """Adds rows [k, deep) of the matrix to the sums of columns [begin, last)."""
        for vectors, kind, width in ((wide, vector, panel), (1, vector, lanes), (1, FLOAT, 1)):
            stop = b.add(begin, emit.whole(b.sub(last, begin), width))
            with emit.loop(begin, stop, width) as (j, _, _):
                place = b.gep(of.w, [j]), of.stride
                # Columns behind the last vector are few, and LLVM takes its time for each size.
                sizes = groups if kind == vector else [(word(0), of.rows, 1)]
                each = functools.partial(all_rows, k, deep, j, vectors, kind, sizes)
                mine = b.gep(packed, [b.sub(word(0), b.mul(k, word(panel)))]), word(panel)
                if width < panel:
                    each(place)
                elif kind_of_weight == FLOAT:
                    with b.if_then(panels):
                        copy(k, deep, j)
                    # LLVM takes its time for each loop over groups, so both kinds share one.
                    each(tuple(b.select(panels, *two) for two in zip(mine, place, strict=True)))
                else:
                    with b.if_else(panels) as (many, some):
                        with many:
                            copy(k, deep, j)
                            each(mine)
                        with some:
                            each(place)
            begin = stop

    def all_rows(
        k: Value, deep: Value, j: Value, vectors: int, kind: ir.Type,
        sizes: Sequence[tuple[Value, Value, int]], place: tuple[Value, Value],
    ) -> None:  # fmt: skip
        """Writes `add` for all rows of x."""
        for group in sizes:
            with emit.loop(*group) as (m, _, _):
                add(k, deep, j, vectors, kind, m, group[2], place)

    groups = emit.groups(of.rows, most)
    panels = b.icmp_signed(">", of.rows, word(_MANY))
    depth = b.select(panels, word(_PANEL_DEEP), word(_DEEP))
    ahead = b.select(panels, b.mul(of.stride, word(_PANEL_DEEP)), word(panel))
    at_once = b.select(panels, word(panel), b.add(b.sub(end, start), word(1)))
    with emit.loop(start, end, at_once) as (left, _, _):
        right = emit.least(b.add(left, at_once), end)
        with emit.loop(word(0), of.depth, depth) as (k, _, _):
            columns(k, emit.least(b.add(k, depth), of.depth), left, right)
