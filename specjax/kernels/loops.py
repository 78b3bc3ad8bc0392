"""The loops of the kernels, for a processor with vectors of `lanes` float32 numbers.

The order in which a number of the result is summed depends on the matrix alone, and not on the
number of rows or on how the columns are cut into parts.  So these products give a token the same
bits in a pass over one token and in a pass over five.
"""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, WORD, Emitter, Value, word, zeros

_TILE = 1024
"""Columns whose sums stay in the first cache while all rows of the matrix pass."""

_FEW = 2
"""Rows of float32 activations up to which reading the matrix takes longer than multiplying."""

_DEEP = 16
"""Rows of the matrix for which sums stay in registers: more are too many places of the memory at
once, and with fewer the sums are moved too often."""

_LINE = 16
"""float32 numbers in a line of the cache."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """`lanes` float32 numbers are a vector, and the processor has `registers` of them."""

    lanes: int
    registers: int


@dataclasses.dataclass(frozen=True)
class Form:
    """How a matrix lies and what it holds; `row` is the dtype of the activations' elements."""

    name: str
    by_columns: bool  # [in, out], as against [out, in]
    weight: ir.Type
    row: ir.Type
    result: ir.Type
    sizes: tuple[int, int]  # bytes of an element of the weights and of the rows


FORMS = {
    "float32": Form("float32", True, FLOAT, FLOAT, FLOAT, (4, 4)),
    "bfloat16": Form("bfloat16", False, INT16, FLOAT, FLOAT, (2, 4)),
    "int8": Form("int8", False, INT8, INT16, INT32, (1, 2)),
}
"""By the dtype of the weights."""


def kernel(module: ir.Module, form: Form, machine: Machine) -> ir.Function:
    """void f(x, w, y, first, last, rows, inner, stride, count): columns [first, last) of y = x @ w.

    x is [rows, inner] and y [rows, count].  w is [inner, stride] by columns, else [stride, inner].
    """
    pointers = [kind.as_pointer() for kind in (form.row, form.weight, form.result)]
    signature = ir.FunctionType(ir.VoidType(), [*pointers, *[WORD] * 6])
    function = ir.Function(module, signature, f"{form.name}_loops")
    function.linkage = "internal"
    for pointer in function.args[:3]:
        pointer.add_attribute("noalias")
    emit = Emitter(function)
    (_columns if form.by_columns else _rows)(emit, form, machine, *function.args)
    emit.b.ret_void()
    return function


def _columns(
    emit: Emitter, form: Form, machine: Machine,
    x: Value, w: Value, y: Value,
    first: Value, last: Value,
    rows: Value, inner: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """Each sum adds the rows of the matrix in their order, so both ways give the same bits."""
    b = emit.b
    small = b.icmp_signed("<=", rows, word(_FEW))
    few, more = b.select(small, rows, word(0)), b.select(small, word(0), rows)

    with emit.loop(first, last, _TILE) as (start, _, _):
        end = emit.least(b.add(start, word(_TILE)), last)
        with emit.loop(word(0), rows, 1) as (m, _, _):
            place = b.gep(y, [b.mul(m, count)])
            with emit.loop(start, end, 1) as (j, _, _):
                emit.write(zeros(FLOAT), place, j, 4)
        sizes = few, inner, stride, count
        _stream(emit, machine, x, w, y, start, end, *sizes)
        _block(emit, machine, x, w, y, start, end, more, *sizes[1:])


def _stream(
    emit: Emitter, machine: Machine,
    x: Value, w: Value, y: Value,
    start: Value, end: Value,
    rows: Value, inner: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """Up to `_FEW` rows of x, for which most of the time goes into reading the matrix.

    Memory is fastest when neighbouring columns are read one after the other.  So all columns of a
    few rows of the matrix pass at once, and the sums are read and written again each time.
    """
    b, lanes = emit.b, machine.lanes
    vector = ir.VectorType(FLOAT, lanes)
    depth = 8 if machine.registers >= 32 else 4

    def add(k: Value, deep: int, m: Value, many: int) -> None:
        """Rows [k, k + deep) of the matrix, into the sums of `many` rows of x."""
        weights = [b.gep(w, [b.mul(b.add(k, word(i)), stride)]) for i in range(deep)]
        mine = [b.add(m, word(i)) for i in range(many)]
        sums = [b.gep(y, [b.mul(i, count)]) for i in mine]
        factors = [
            [emit.read(x, b.add(b.add(b.mul(i, inner), k), word(j)), FLOAT, 4) for j in range(deep)]
            for i in mine
        ]
        spread = [[emit.splat(factor, lanes) for factor in row] for row in factors]
        middle = b.add(start, emit.whole(b.sub(end, start), lanes))
        for begin, stop, kind, step, by in (
            (start, middle, vector, lanes, spread),
            (middle, end, FLOAT, 1, factors),
        ):
            with emit.loop(begin, stop, step) as (j, _, _):
                totals = [emit.read(place, j, kind, 4) for place in sums]
                for i in range(deep):
                    weight = emit.read(weights[i], j, kind, 4)
                    totals = [
                        emit.multiply_add(row[i], weight, total)
                        for row, total in zip(by, totals, strict=True)
                    ]
                for total, place in zip(totals, sums, strict=True):
                    emit.write(total, place, j, 4)

    whole, groups = emit.whole(inner, depth), emit.groups(rows, _FEW)
    for low, high, step in ((word(0), whole, depth), (whole, inner, 1)):
        with emit.loop(low, high, step) as (k, _, _):
            for group in groups:
                with emit.loop(*group) as (m, _, _):
                    add(k, step, m, group[2])


def _block(
    emit: Emitter, machine: Machine,
    x: Value, w: Value, y: Value,
    start: Value, end: Value,
    rows: Value, inner: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """More rows of x, for which most of the time goes into multiplying.

    The sums of a group of rows, for a few neighbouring columns, stay in registers while `_DEEP`
    rows of the matrix pass.  Meanwhile the next columns are prefetched, since the processor does
    not guess that they come next.
    """
    b, lanes = emit.b, machine.lanes
    vector = ir.VectorType(FLOAT, lanes)
    most, wide = (6, 4) if machine.registers >= 32 else (4, 2)

    def add(k: Value, deep: Value, j: Value, vectors: int, kind: ir.Type, m: Value, many: int):
        """Rows [k, deep) of the matrix, into sums of `many` rows of x from m.

        The sums are those of the columns in `vectors` of `kind`, from column j.
        """
        width = lanes if kind == vector else 1
        mine = [b.add(m, word(i)) for i in range(many)]
        activations = [b.gep(x, [b.mul(i, inner)]) for i in mine]
        sums = [b.gep(y, [b.add(b.mul(i, count), j)]) for i in mine]
        places = [(place, word(v * width)) for place in sums for v in range(vectors)]
        before = [emit.read(*place, kind, 4) for place in places]
        with emit.loop(k, deep, 1, before) as (i, totals, following):
            row = b.gep(w, [b.add(b.mul(i, stride), j)])
            for ahead in range(vectors * width, 2 * vectors * width, _LINE):
                emit.prefetch(b.gep(row, [word(ahead)]))
            weights = [emit.read(row, word(v * width), kind, 4) for v in range(vectors)]
            for r, place in enumerate(activations):
                factor = emit.read(place, i, FLOAT, 4)
                factor = emit.splat(factor, lanes) if kind == vector else factor
                for v, weight in enumerate(weights):
                    at = r * vectors + v
                    following[at] = emit.multiply_add(factor, weight, totals[at])
        for total, place in zip(totals, places, strict=True):
            emit.write(total, *place, 4)

    groups = emit.groups(rows, most)
    with emit.loop(word(0), inner, _DEEP) as (k, _, _):
        deep, begin = emit.least(b.add(k, word(_DEEP)), inner), start
        for vectors, kind, width in (
            (wide, vector, wide * lanes),
            (1, vector, lanes),
            (1, FLOAT, 1),
        ):
            stop = b.add(begin, emit.whole(b.sub(end, begin), width))
            with emit.loop(begin, stop, width) as (j, _, _):
                for group in groups:
                    with emit.loop(*group) as (m, _, _):
                        add(k, deep, j, vectors, kind, m, group[2])
            begin = stop


def _rows(
    emit: Emitter, form: Form, machine: Machine,
    x: Value, w: Value, y: Value,
    first: Value, last: Value,
    rows: Value, inner: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """Scalar products of rows of the matrix and rows of x, of several with several at once.

    Each sum has `lanes` parts, which are added at its end.
    """
    b, lanes = emit.b, machine.lanes
    step = 2 * lanes if form.weight == INT8 else lanes
    outputs, most = 4, 6 if machine.registers >= 32 else 2
    weight_size, row_size = form.sizes

    def widened(weights: Value) -> Value:
        """Weights as numbers that can be multiplied: one, or a vector of them."""
        of = weights.type
        many = isinstance(of, ir.VectorType)
        if form.weight == INT8:
            return b.sext(weights, ir.VectorType(INT16, of.count) if many else INT16)
        return emit.widened(weights)

    def add(weight: Value, row: Value, total: Value) -> Value:
        if form.weight != INT8:
            return emit.multiply_add(weight, row, total)
        many = isinstance(row.type, ir.VectorType)
        wide = ir.VectorType(INT32, step) if many else INT32
        product = b.mul(b.sext(weight, wide), b.sext(row, wide))
        if many:  # neighbours first, which processors have an instruction for
            even, odd = (emit.lanes(product, range(i, step, 2)) for i in range(2))
            product = b.add(even, odd)
        return b.add(total, product)

    def block(i: Value, outputs: int, m: Value, inputs: int) -> None:
        columns = [b.add(i, word(j)) for j in range(outputs)]
        weights = [b.gep(w, [b.mul(j, inner)]) for j in columns]
        mine = [b.add(m, word(j)) for j in range(inputs)]
        activations = [b.gep(x, [b.mul(j, inner)]) for j in mine]
        pairs = [(r, c) for r in range(inputs) for c in range(outputs)]

        def sums(start: Value, stop: Value, by: int, totals: list[Value]) -> list[Value]:
            """`totals` after the products of [start, stop), `by` at a time."""
            scalar = by == 1
            with emit.loop(start, stop, by, totals) as (k, now, following):
                if not scalar:
                    ahead = b.add(k, b.mul(inner, word(outputs)))
                    for place in weights:
                        emit.prefetch(b.gep(place, [ahead]))
                kinds = [t if scalar else ir.VectorType(t, by) for t in (form.weight, form.row)]
                read = [widened(emit.read(p, k, kinds[0], weight_size)) for p in weights]
                for r, place in enumerate(activations):
                    row = emit.read(place, k, kinds[1], row_size)
                    for c, weight in enumerate(read):
                        at = r * outputs + c
                        following[at] = add(weight, row, now[at])
            return now

        whole = emit.whole(inner, step)
        empty = [zeros(ir.VectorType(form.result, lanes)) for _ in pairs]
        totals = [emit.sum(total) for total in sums(word(0), whole, step, empty)]
        totals = sums(whole, inner, 1, totals)
        for (r, c), total in zip(pairs, totals, strict=True):
            emit.write(total, y, b.add(b.mul(mine[r], count), columns[c]), 4)

    many = b.add(first, emit.whole(b.sub(last, first), outputs))
    groups = emit.groups(rows, most)
    for low, high, width in ((first, many, outputs), (many, last, 1)):
        with emit.loop(low, high, width) as (i, _, _):
            for group in groups:
                with emit.loop(*group) as (m, _, _):
                    block(i, width, m, group[2])
