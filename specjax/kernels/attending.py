"""The loops of attention of few queries, for each row of a batch and each head of keys.

Slots are read in blocks that begin at multiples of 64, with an online softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3).  A block that no token of the row sees is skipped.
A query does nothing in a block that it does not see, and its sums over another block have an order
that depends on the slots' numbers alone.  So its bits depend on neither the other queries nor the
size of the cache, and what lies in slots that it does not see is multiplied by nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.functions import exponential, tangent
from specjax.kernels.loops import Machine

_BLOCK = 64
"""Slots whose keys stay in the first cache while all queries pass."""

_SUMS = 8
"""Vectors that are added up at once, which hides the latency of an addition."""

_LINE = 64  # bytes of a line of the processor's cache


@dataclasses.dataclass(frozen=True)
class Attention:
    """The `sharing.Work` of attention; a part is one row of the batch and one head of keys.

    With fewer of them than threads a part has only some of the queries of the head.

    Its buffers are queries [B, N, H, dim] in float32, keys and values [B, K, S, dim] in `dtype`,
    which slots are visible [B or 1, N, S], two numbers (the scale, and the softcap if `capped`),
    and the result [B, N, H, dim] in float32.
    """

    dtype: str
    dim: int
    capped: bool
    machine: Machine

    buffers = 6
    sizes = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (3, 0))  # B, N, H, K, S, B or 1

    @property
    def name(self) -> str:
        return f"attention_{self.dtype}_{self.dim}"

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        batch, width, heads, _, slots, _ = sizes
        each = emit.b.mul(emit.b.mul(heads, slots), word(2 * self.dim))
        return emit.b.mul(emit.b.mul(batch, width), each)

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        b = emit.b
        batch, _, heads, key_heads, _, _ = sizes
        pairs, groups = b.mul(batch, key_heads), b.sdiv(heads, key_heads)
        wanted = emit.least(b.sdiv(b.sub(b.add(threads, pairs), word(1)), pairs), groups)
        equal = b.icmp_signed("==", b.srem(groups, wanted), word(0))
        return b.mul(pairs, b.select(equal, wanted, groups))

    def function(self, module: ir.Module) -> ir.Function:
        element = FLOAT if self.dtype == "float32" else INT16
        kinds = (FLOAT, element, element, INT8, FLOAT, FLOAT)
        places = [kind.as_pointer() for kind in kinds]
        signature = ir.FunctionType(ir.VoidType(), [*places, *[WORD] * 8])
        function = ir.Function(module, signature, f"{self.name}_part")
        function.linkage = "internal"
        for pointer in function.args[: self.buffers]:
            pointer.add_attribute("noalias")
        _Part(self, function).write_all()
        return function


class _Part:
    """Writes the instructions of one part.

    Rows in its memory have `padded` numbers, a multiple of a vector.  Query r is that of token
    r // groups and of head r % groups among those of the part.
    """

    def __init__(self, work: Attention, function: ir.Function) -> None:
        self.work, self.lanes = work, work.machine.lanes
        self.dim, self.padded = work.dim, -(-work.dim // self.lanes) * self.lanes
        self.emit = Emitter(function)
        self.vector = ir.VectorType(FLOAT, self.lanes)
        b: Any = self.emit.b
        self.b = b
        (
            self.queries, self.keys, self.values, self.visible, self.numbers, self.out,
            part, parts, batch, self.width, self.heads, key_heads, self.slots, masks,
        ) = function.args  # fmt: skip
        of_row = b.sdiv(parts, batch)
        self.groups = b.sdiv(self.heads, of_row)
        self.row, of_heads = b.sdiv(part, of_row), b.srem(part, of_row)
        self.first_head = b.mul(of_heads, self.groups)
        key_head = b.sdiv(b.mul(of_heads, key_heads), of_row)
        pair = b.add(b.mul(self.row, key_heads), key_head)
        cache = b.mul(b.mul(pair, self.slots), word(self.dim))
        self.keys, self.values = b.gep(self.keys, [cache]), b.gep(self.values, [cache])
        shared = b.icmp_signed("==", masks, word(1))
        mask = b.select(shared, word(0), b.mul(self.row, b.mul(self.width, self.slots)))
        self.visible = b.gep(self.visible, [mask])
        self._take_memory()

    def _take_memory(self) -> None:
        b = self.b
        rows = b.mul(self.width, self.groups)
        a_line = _LINE // 4
        pieces = [  # in float32 numbers
            b.mul(rows, word(self.padded)),
            b.mul(rows, word(self.padded)),
            b.mul(rows, word(_BLOCK)),
            word(_BLOCK * self.padded),
            b.mul(self.width, word(_BLOCK // 4)),
            *[rows] * 3,
        ]
        ends = [word(a_line)]
        for piece in pieces:
            ends.append(b.add(ends[-1], piece))
        self.memory = b.call(self.emit.c("malloc"), [b.mul(ends[-1], word(4))])
        address = b.add(b.ptrtoint(self.memory, WORD), word(_LINE - 1))
        aligned = b.inttoptr(self.emit.whole(address, _LINE), FLOAT.as_pointer())
        places = [b.gep(aligned, [b.sub(end, word(a_line))]) for end in ends[:-1]]
        self.scaled, self.mixed, self.weights, self.block, seen = places[:5]
        self.most, self.total, self.keep = places[5:]
        self.seen = b.bitcast(seen, INT8.as_pointer())

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        self._begin()
        with emit.loop(word(0), self.slots, _BLOCK) as (start, _, _):
            count = emit.least(word(_BLOCK), b.sub(self.slots, start))
            with b.if_then(self._look(start, count)):
                keys = self._rows(self.keys, start, count)
                with self._each_query(living=True) as (token, row):
                    self._weigh(keys, token, row)
                values = self._rows(self.values, start, count)
                with self._each_query(living=True) as (_, row):
                    self._mix(values, row)
        self._finish()
        b.call(emit.c("free"), [self.memory])
        b.ret_void()

    @contextlib.contextmanager
    def _each_query(self, living: bool = False) -> Iterator[tuple[Value, Value]]:
        """(token, query); with `living` only those that see a slot of the block."""
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.width, 1) as (token, _, _):
            alive = self._any(self._mask(token)) if living else ir.Constant(ir.IntType(1), 1)
            with b.if_then(alive):
                first = b.mul(token, self.groups)
                with emit.loop(first, b.add(first, self.groups), 1) as (row, _, _):
                    yield token, row

    def _begin(self) -> None:
        """Scaled queries, and empty sums."""
        b, emit = self.b, self.emit
        scale = b.load(self.numbers)
        with self._each_query() as (token, row):
            at = b.mul(row, word(self.padded))
            place = self._of(self.queries, token, row)
            self._copy(place, b.gep(self.scaled, [at]), lambda x: self._times(x, scale))
            with emit.loop(at, b.add(at, word(self.padded)), self.lanes) as (i, _, _):
                emit.write(zeros(self.vector), self.mixed, i, 4)
            emit.write(ir.Constant(FLOAT, float("-inf")), self.most, row, 4)
            emit.write(zeros(FLOAT), self.total, row, 4)

    def _finish(self) -> None:
        b, emit = self.b, self.emit
        with self._each_query() as (token, row):
            total = emit.read(self.total, row, FLOAT, 4)
            # A query that sees nothing has 0, as the others of its pass must not become NaN.
            none = b.fcmp_ordered("==", total, zeros(FLOAT))
            total = b.select(none, ir.Constant(FLOAT, 1.0), total)
            mixed = b.gep(self.mixed, [b.mul(row, word(self.padded))])
            place = self._of(self.out, token, row)
            whole = self.dim - self.dim % self.lanes
            with emit.loop(word(0), word(whole), self.lanes) as (i, _, _):
                sums = emit.read(mixed, i, self.vector, 4)
                emit.write(b.fdiv(sums, emit.splat(total, self.lanes)), place, i, 4)
            for i in range(whole, self.dim):
                one = emit.read(mixed, word(i), FLOAT, 4)
                emit.write(b.fdiv(one, total), place, word(i), 4)

    def _look(self, start: Value, count: Value) -> Value:
        """Copy which slots of a block are visible, and return whether any is."""
        b, emit = self.b, self.emit
        none = zeros(ir.VectorType(INT8, _BLOCK))
        whole = b.icmp_signed("==", count, word(_BLOCK))
        with emit.loop(word(0), self.width, 1, [none]) as (token, (seen,), following):
            source = b.gep(self.visible, [b.add(b.mul(token, self.slots), start)])
            target = b.gep(self.seen, [b.mul(token, word(_BLOCK))])
            with b.if_else(whole) as (then, otherwise):
                with then:
                    emit.write(emit.read(source, word(0), none.type, 1), target, word(0), 1)
                with otherwise:
                    emit.write(none, target, word(0), 1)
                    with emit.loop(word(0), count, 1) as (i, _, _):
                        emit.write(emit.read(source, i, INT8, 1), target, i, 1)
            following[0] = b.or_(seen, self._mask(token))
        return self._any(seen)

    def _mask(self, token: Value) -> Value:
        at = self.b.mul(token, word(_BLOCK))
        return self.emit.read(self.seen, at, ir.VectorType(INT8, _BLOCK), 1)

    def _any(self, mask: Value) -> Value:
        bits = ir.IntType(8 * _BLOCK)
        return self.b.icmp_unsigned("!=", self.b.bitcast(mask, bits), ir.Constant(bits, 0))

    def _rows(self, source: Value, start: Value, count: Value) -> Value:
        """Rows of a block in float32, `padded` numbers each; what is after them can be read."""
        b, emit = self.b, self.emit
        source = b.gep(source, [b.mul(start, word(self.dim))])

        def copy() -> None:
            with emit.loop(word(0), count, 1) as (i, _, _):
                place = b.gep(source, [b.mul(i, word(self.dim))])
                self._copy(place, b.gep(self.block, [b.mul(i, word(self.padded))]))

        if self.work.dtype != "float32" or self.dim != self.padded:
            copy()
            return self.block
        whole = b.icmp_signed("==", count, word(_BLOCK))
        with b.if_then(b.not_(whole)):
            copy()
        return b.select(whole, source, self.block)

    def _copy(
        self, source: Value, target: Value, change: Callable[[Value], Value] | None = None
    ) -> None:
        """One row in float32, changed, with zeros after it."""
        b, emit = self.b, self.emit
        kind = source.type.pointee
        narrow = kind == INT16
        size = 2 if narrow else 4
        whole = self.dim - self.dim % self.lanes

        def changed(value: Value) -> Value:
            value = emit.widened(value) if narrow else value
            return value if change is None else change(value)

        with emit.loop(word(0), word(whole), self.lanes) as (i, _, _):
            value = emit.read(source, i, ir.VectorType(kind, self.lanes), size)
            emit.write(changed(value), target, i, 4)
        if whole < self.dim:
            last = zeros(ir.VectorType(kind, self.lanes))
            for i in range(whole, self.dim):
                one = emit.read(source, word(i), kind, size)
                last = b.insert_element(last, one, ir.Constant(INT32, i - whole))
            emit.write(changed(last), target, word(whole), 4)

    def _weigh(self, keys: Value, token: Value, row: Value) -> None:
        """The weights of a block for one query, and what is kept of its sums so far."""
        b, emit, lanes = self.b, self.emit, self.lanes
        query = b.gep(self.scaled, [b.mul(row, word(self.padded))])
        weights = b.gep(self.weights, [b.mul(row, word(_BLOCK))])
        seen = b.gep(self.seen, [b.mul(token, word(_BLOCK))])
        hidden = emit.constant(float("-inf"), lanes)

        def visible(i: Value) -> Value:
            some = ir.VectorType(INT8, lanes)
            return b.icmp_unsigned("!=", emit.read(seen, i, some, 1), zeros(some))

        with emit.loop(word(0), word(_BLOCK), lanes, [hidden]) as (i, (best,), following):
            block = b.gep(keys, [b.mul(i, word(self.padded))])
            empty = [zeros(self.vector)] * lanes
            with emit.loop(word(0), word(self.padded), lanes, empty) as (d, sums, added):
                numbers = emit.read(query, d, self.vector, 4)
                for j in range(lanes):
                    at = b.add(d, word(j * self.padded))
                    added[j] = emit.multiply_add(
                        emit.read(block, at, self.vector, 4), numbers, sums[j]
                    )
            score = self._capped(emit.sums(sums))
            score = b.select(visible(i), score, hidden)
            emit.write(score, weights, i, 4)
            following[0] = emit.larger(score, best)
        most = emit.read(self.most, row, FLOAT, 4)
        halves = best
        while (count := halves.type.count) > 1:
            half = count // 2
            halves = emit.larger(
                emit.lanes(halves, range(half)), emit.lanes(halves, range(half, count))
            )
        higher = emit.larger(b.extract_element(halves, ir.Constant(INT32, 0)), most)
        subtracted = emit.splat(higher, lanes)
        shrink = exponential(emit, b.fsub(emit.splat(most, lanes), subtracted))
        keep = b.extract_element(shrink, ir.Constant(INT32, 0))
        with emit.loop(word(0), word(_BLOCK), lanes, [zeros(self.vector)]) as (i, now, following):
            score = emit.read(weights, i, self.vector, 4)
            weight = exponential(emit, b.fsub(score, subtracted))
            weight = b.select(visible(i), weight, zeros(self.vector))
            emit.write(weight, weights, i, 4)
            following[0] = b.fadd(now[0], weight)
        total = emit.read(self.total, row, FLOAT, 4)
        emit.write(emit.multiply_add(total, keep, emit.sum(now[0])), self.total, row, 4)
        emit.write(higher, self.most, row, 4)
        emit.write(keep, self.keep, row, 4)

    def _capped(self, score: Value) -> Value:
        if not self.work.capped:
            return score
        b = self.b
        cap = self.emit.splat(self.emit.read(self.numbers, word(1), FLOAT, 4), self.lanes)
        return b.fmul(cap, tangent(self.emit, b.fdiv(score, cap)))

    def _mix(self, values: Value, row: Value) -> None:
        """Add the weighted values of a block to the sums of one query.

        Slots take turns among a few sums, which are added at the end.  An unseen slot reads zeros
        in place of its values, which may be infinite.
        """
        b, emit, lanes = self.b, self.emit, self.lanes
        weights = b.gep(self.weights, [b.mul(row, word(_BLOCK))])
        mixed = b.gep(self.mixed, [b.mul(row, word(self.padded))])
        nothing = self._zeros()
        keep = emit.splat(emit.read(self.keep, row, FLOAT, 4), lanes)
        vectors = self.padded // lanes
        for first in range(0, vectors, _SUMS):
            many = min(_SUMS, vectors - first)
            turns = 2 ** ((_SUMS // many).bit_length() - 1)  # it divides a block
            empty = [zeros(self.vector)] * (many * turns)
            with emit.loop(word(0), word(_BLOCK), turns, empty) as (s, now, following):
                for turn in range(turns):
                    slot = b.add(s, word(turn))
                    weight = emit.read(weights, slot, FLOAT, 4)
                    at = b.add(b.mul(slot, word(self.padded)), word(first * lanes))
                    seen = b.fcmp_unordered("!=", weight, zeros(FLOAT))
                    place = b.select(seen, b.gep(values, [at]), nothing)
                    spread = emit.splat(weight, lanes)
                    for c in range(turn * many, (turn + 1) * many):
                        offset = word(c % many * lanes)
                        value = emit.read(place, offset, self.vector, 4)
                        following[c] = emit.multiply_add(spread, value, now[c])
            for c in range(many):
                added = functools.reduce(b.fadd, now[c::many])
                at = word((first + c) * lanes)
                before = emit.read(mixed, at, self.vector, 4)
                emit.write(emit.multiply_add(before, keep, added), mixed, at, 4)

    def _zeros(self) -> Value:
        module, name = self.b.module, f"{self.work.name}_zeros"
        kind = ir.ArrayType(FLOAT, _SUMS * self.lanes)
        if name not in module.globals:
            made = ir.GlobalVariable(module, kind, name)
            made.linkage, made.global_constant, made.initializer = "internal", True, zeros(kind)
        return self.b.bitcast(module.globals[name], FLOAT.as_pointer())

    def _of(self, base: Value, token: Value, row: Value) -> Value:
        """Where a query or its result is, in a buffer [B, N, H, dim]."""
        b = self.b
        first = b.mul(b.add(b.mul(self.row, self.width), token), self.heads)
        head = b.add(self.first_head, b.srem(row, self.groups))
        return b.gep(base, [b.mul(b.add(first, head), word(self.dim))])

    def _times(self, x: Value, scale: Value) -> Value:
        return self.b.fmul(x, self.emit.splat(scale, x.type.count))
