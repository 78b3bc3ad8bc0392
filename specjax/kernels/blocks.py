"""`block`: the product of several rows with a matrix whose columns lie side by side."""

from __future__ import annotations

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, Emitter, Value, word
from specjax.kernels.forms import Machine, Operands

_DEEP = 16
"""Rows of the matrix for which sums stay in registers: more rows are too many addresses at once,
and with fewer the sums are moved too often.
"""

_LINE = 16
"""The float32 numbers in a cache line."""


def block(emit: Emitter, machine: Machine, of: Operands, start: Value, end: Value) -> None:
    """Multiplies many rows of x, for which most of the time goes into multiplying.

    The sums of a group of rows, for a few neighbouring columns, stay in registers while `_DEEP`
    rows of the matrix pass.  Meanwhile the next columns are prefetched, since the processor does
    not predict them.
    """
    b, lanes = emit.b, machine.lanes
    vector = ir.VectorType(FLOAT, lanes)
    most, wide = (6, 4) if machine.registers >= 32 else (4, 2)

    def add(k: Value, deep: Value, j: Value, vectors: int, kind: ir.Type, m: Value, many: int):
        """Adds rows [k, deep) of the matrix, into sums of `many` rows of x from m.

        The sums are those of the columns in `vectors` of `kind`, from column j.
        """
        width = lanes if kind == vector else 1
        mine = [b.add(m, word(i)) for i in range(many)]
        activations = [b.gep(of.x, [b.mul(i, of.inner)]) for i in mine]
        sums = [b.gep(of.y, [b.add(b.mul(i, of.count), j)]) for i in mine]
        places = [(place, word(v * width)) for place in sums for v in range(vectors)]
        before = [emit.read(*place, kind, 4) for place in places]
        with emit.loop(k, deep, 1, before) as (i, totals, following):
            row = b.gep(of.w, [b.add(b.mul(i, of.stride), j)])
            for ahead in range(vectors * width, 2 * vectors * width, _LINE):
                emit.prefetch(b.gep(row, [word(ahead)]))
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

    groups = emit.groups(of.rows, most)
    with emit.loop(word(0), of.inner, _DEEP) as (k, _, _):
        deep, begin = emit.least(b.add(k, word(_DEEP)), of.inner), start
        for vectors, kind, width in (
            (wide, vector, wide * lanes),
            (1, vector, lanes),
            (1, FLOAT, 1),
        ):
            stop = b.add(begin, emit.whole(b.sub(end, begin), width))
            with emit.loop(begin, stop, width) as (j, _, _):
                # Columns behind the last vector are few, and LLVM takes its time for each size.
                for group in groups if kind == vector else [(word(0), of.rows, 1)]:
                    with emit.loop(*group) as (m, _, _):
                        add(k, deep, j, vectors, kind, m, group[2])
            begin = stop
