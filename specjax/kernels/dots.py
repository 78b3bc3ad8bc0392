"""`dots`: the product of a few rows with a matrix of which each row gives a number."""

from __future__ import annotations

from llvmlite import ir

from specjax.kernels.emitting import INT8, INT16, INT32, Emitter, Value, word, zeros
from specjax.kernels.forms import Form, Machine, Operands
from specjax.kernels.orders import AHEAD, apart


def dots(
    emit: Emitter, form: Form, machine: Machine, of: Operands, first: Value, last: Value
) -> None:
    """Multiplies rows of the matrix with rows of x as scalar products, several at once.

    Each sum has `lanes` partial sums, which are added at its end.  With several streams, rows of
    the matrix that are multiplied at once lie far apart, so that each begins a long run.
    """
    b, lanes = emit.b, machine.lanes
    step = 2 * lanes if form.weight == INT8 else lanes
    streams = machine.streams
    weight_size, row_size = form.sizes

    def widened(weights: Value) -> Value:
        """Returns weights as numbers that can be multiplied: one, or a vector of them."""
        kind = weights.type
        many = isinstance(kind, ir.VectorType)
        if form.weight == INT8:
            return b.sext(weights, ir.VectorType(INT16, kind.count) if many else INT16)
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
        columns = apart(emit, streams, first, last, i, outputs)
        weights = [b.gep(of.w, [b.mul(j, of.inner)]) for j in columns]
        mine = [b.add(m, word(j)) for j in range(inputs)]
        activations = [b.gep(of.x, [b.mul(j, of.inner)]) for j in mine]
        pairs = [(r, c) for r in range(inputs) for c in range(outputs)]

        def sums(start: Value, stop: Value, by: int, totals: list[Value]) -> list[Value]:
            """Returns `totals` after the products of [start, stop), `by` at a time."""
            scalar = by == 1
            with emit.loop(start, stop, by, totals) as (k, now, following):
                if not scalar:
                    far = b.mul(of.inner, word(outputs))
                    ahead = b.add(k, far if streams == 1 else word(AHEAD // weight_size))
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

        whole = emit.whole(of.inner, step)
        empty = [zeros(ir.VectorType(form.result, lanes)) for _ in pairs]
        held = sums(word(0), whole, step, empty)
        # Whole numbers may be added in any order.
        totals = emit.each_sum(held) if form.weight == INT8 else [emit.sum(each) for each in held]
        totals = sums(whole, of.inner, 1, totals)
        for (r, c), total in zip(pairs, totals, strict=True):
            emit.write(total, of.y, b.add(b.mul(mine[r], of.count), columns[c]), 4)

    if machine.registers >= 32:
        emit.tiles(first, last, 4, of.rows, 6, block)
        return
    # Vectors are widened for each group of rows, and 12 sums are all that there are registers for.
    small = b.icmp_signed("<=", of.rows, word(2))
    for outputs, most, rows in ((4, 2, (of.rows, word(0))), (2, 6, (word(0), of.rows))):
        emit.tiles(first, last, outputs, b.select(small, *rows), most, block)
