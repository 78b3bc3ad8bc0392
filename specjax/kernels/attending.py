"""The loops of attention of few queries, for each row of a batch and each key head.

Slots are read in blocks that begin at multiples of 64, with an online softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867, algorithm 3).  A block that no token of the row sees is skipped.
A block that a query does not see leaves its sums unchanged, and the order of the sums over another
block depends only on the slots' numbers.  So its bits depend neither on the other queries nor on
the size of the cache, nor on the contents of slots that it does not see.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.forms import Machine
from specjax.kernels.mixing import BLOCK, TOGETHER, Memory, Mixing
from specjax.kernels.pieces import Piece

_LINE = 64  # bytes of a line of the processor's cache


@dataclasses.dataclass(frozen=True)
class Attention:
    """The `sharing.Work` of attention; a part is one row of the batch and one key head.

    With fewer of them than threads a part has only some of the queries of the head.

    Its buffers are queries [B, N, H, dim] in float32, keys and values [B, K, S, dim] in `dtype`,
    which slots are visible [B or 1, N, S], two numbers (the scale, and the softcap if `capped`),
    and the result [B, N, H, dim] in float32.

    With `page` slots in a page, keys and values are pages [P, K, page, dim], and before the result
    comes the table [B, S / page] with the numbers of each row's pages.
    """

    dtype: str
    dim: int
    capped: bool
    machine: Machine
    page: int | None = None

    @property
    def buffers(self) -> int:
        return 6 if self.page is None else 7

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Returns the sizes B, N, H, K, S, and B or 1."""
        return (0, 0), (0, 1), (0, 2), (1, 1), (3, 2), (3, 0)

    @property
    def name(self) -> str:
        pages = "" if self.page is None else f"_pages_of_{self.page}"
        return f"attention_{self.dtype}_{self.dim}{'_capped' if self.capped else ''}{pages}"

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

    @property
    def pieces(self) -> Sequence[Piece]:
        element = FLOAT if self.dtype == "float32" else INT16
        table = () if self.page is None else (INT32,)
        kinds = (FLOAT, element, element, INT8, FLOAT, *table, FLOAT)
        places = [kind.as_pointer() for kind in kinds]

        def write(function: ir.Function) -> None:
            _Part(self, function).write_all()

        return (
            Piece(
                f"specjax_{self.name}_{self.machine.name}_part",
                (*places, *[WORD] * 8),
                self.buffers,
                write,
            ),
        )

    def function(self, module: ir.Module) -> ir.Function:
        return self.pieces[0].declare(module)


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
            self.queries, self.keys, self.values, self.visible, self.numbers, *table, self.out,
            part, parts, batch, self.width, self.heads, self.key_heads, self.slots, masks,
        ) = function.args  # fmt: skip
        of_row = b.sdiv(parts, batch)
        self.groups = b.sdiv(self.heads, of_row)
        self.row, of_heads = b.sdiv(part, of_row), b.srem(part, of_row)
        self.first_head = b.mul(of_heads, self.groups)
        self.key_head = b.sdiv(b.mul(of_heads, self.key_heads), of_row)
        self.table = None
        if work.page is None:
            pair = b.add(b.mul(self.row, self.key_heads), self.key_head)
            cache = b.mul(b.mul(pair, self.slots), word(self.dim))
            self.keys, self.values = b.gep(self.keys, [cache]), b.gep(self.values, [cache])
        else:
            pages = b.sdiv(self.slots, word(work.page))
            self.table = b.gep(table[0], [b.mul(self.row, pages)])
        shared = b.icmp_signed("==", masks, word(1))
        mask = b.select(shared, word(0), b.mul(self.row, b.mul(self.width, self.slots)))
        self.visible = b.gep(self.visible, [mask])
        self.memory = self._take_memory()
        softcap = self.emit.read(self.numbers, word(1), FLOAT, 4) if work.capped else None
        self.mixing = Mixing(self.emit, work.machine, self.padded, softcap, self.memory)

    def _take_memory(self) -> Memory:
        b = self.b
        rows = b.mul(self.width, self.groups)
        a_line = _LINE // 4
        pieces = [  # in float32 numbers
            b.mul(rows, word(self.padded)),
            b.mul(rows, word(self.padded)),
            b.mul(rows, word(BLOCK)),
            *[rows] * 3,
            word(BLOCK * self.padded),
            b.mul(self.width, word(BLOCK // 4)),
        ]
        ends = [word(a_line)]
        for piece in pieces:
            ends.append(b.add(ends[-1], piece))
        self.taken = b.call(self.emit.c("malloc"), [b.mul(ends[-1], word(4))])
        address = b.add(b.ptrtoint(self.taken, WORD), word(_LINE - 1))
        aligned = b.inttoptr(self.emit.whole(address, _LINE), FLOAT.as_pointer())
        places = [b.gep(aligned, [b.sub(end, word(a_line))]) for end in ends[:-1]]
        *rows, self.block, seen = places
        self.seen = b.bitcast(seen, INT8.as_pointer())
        return Memory(*rows)

    def write_all(self) -> None:
        b, emit = self.b, self.emit
        self._begin()
        with emit.loop(word(0), self.slots, BLOCK) as (start, _, _):
            count = emit.least(word(BLOCK), b.sub(self.slots, start))
            with b.if_then(self._look(start, count)):
                self._in_groups(self.mixing.score, self._rows(self.keys, start, count))
                with self._each_query() as (token, row):
                    with b.if_else(self._any(self._mask(token))) as (seen, hidden):
                        with seen:
                            self.mixing.weigh(self._seen(token), row)
                        with hidden:
                            self.mixing.pass_over(row)
                self._in_groups(self.mixing.mix, self._rows(self.values, start, count))
        self._finish()
        b.call(emit.c("free"), [self.taken])
        b.ret_void()

    @contextlib.contextmanager
    def _each_query(self) -> Iterator[tuple[Value, Value]]:
        """Yields (token, query)."""
        b, emit = self.b, self.emit
        with emit.loop(word(0), self.width, 1) as (token, _, _):
            first = b.mul(token, self.groups)
            with emit.loop(first, b.add(first, self.groups), 1) as (row, _, _):
                yield token, row

    def _in_groups(self, do: Callable[[Value, Value, int], None], block: Value) -> None:
        """Runs `do` on a block for several queries at once, and for the remaining ones."""
        rows = self.b.mul(self.width, self.groups)
        grouped = self.emit.whole(rows, TOGETHER)
        for low, high, many in ((word(0), grouped, TOGETHER), (grouped, rows, 1)):
            with self.emit.loop(low, high, many) as (row, _, _):
                do(block, row, many)

    def _begin(self) -> None:
        """Writes scaled queries, and empty sums."""
        b, emit = self.b, self.emit
        scale = b.load(self.numbers)
        with self._each_query() as (token, row):
            at = b.mul(row, word(self.padded))
            place = self._of(self.queries, token, row)
            self._copy(place, b.gep(self.memory.scaled, [at]), lambda x: self._times(x, scale))
            with emit.loop(at, b.add(at, word(self.padded)), self.lanes) as (i, _, _):
                emit.write(zeros(self.vector), self.memory.mixed, i, 4)
            emit.write(ir.Constant(FLOAT, float("-inf")), self.memory.most, row, 4)
            emit.write(zeros(FLOAT), self.memory.total, row, 4)

    def _finish(self) -> None:
        b, emit = self.b, self.emit
        with self._each_query() as (token, row):
            total = emit.read(self.memory.total, row, FLOAT, 4)
            # A query that sees nothing has 0, as the others of its pass must not become NaN.
            none = b.fcmp_ordered("==", total, zeros(FLOAT))
            total = b.select(none, ir.Constant(FLOAT, 1.0), total)
            mixed = b.gep(self.memory.mixed, [b.mul(row, word(self.padded))])
            place = self._of(self.out, token, row)
            whole = self.dim - self.dim % self.lanes
            # 0 is added, since the sign of a zero may depend on slots that are not seen.
            with emit.loop(word(0), word(whole), self.lanes) as (i, _, _):
                sums = b.fadd(emit.read(mixed, i, self.vector, 4), zeros(self.vector))
                emit.write(b.fdiv(sums, emit.splat(total, self.lanes)), place, i, 4)
            for i in range(whole, self.dim):
                one = b.fadd(emit.read(mixed, word(i), FLOAT, 4), zeros(FLOAT))
                emit.write(b.fdiv(one, total), place, word(i), 4)

    def _look(self, start: Value, count: Value) -> Value:
        """Copies which slots of a block are visible, and returns whether any is."""
        b, emit = self.b, self.emit
        none = zeros(ir.VectorType(INT8, BLOCK))
        whole = b.icmp_signed("==", count, word(BLOCK))
        with emit.loop(word(0), self.width, 1, [none]) as (token, (seen,), following):
            source = b.gep(self.visible, [b.add(b.mul(token, self.slots), start)])
            target = self._seen(token)
            with b.if_else(whole) as (then, otherwise):
                with then:
                    emit.write(emit.read(source, word(0), none.type, 1), target, word(0), 1)
                with otherwise:
                    emit.write(none, target, word(0), 1)
                    with emit.loop(word(0), count, 1) as (i, _, _):
                        emit.write(emit.read(source, i, INT8, 1), target, i, 1)
            following[0] = b.or_(seen, self._mask(token))
        return self._any(seen)

    def _seen(self, token: Value) -> Value:
        """Returns the address where the slots that a token sees are marked, one byte each."""
        return self.b.gep(self.seen, [self.b.mul(token, word(BLOCK))])

    def _mask(self, token: Value) -> Value:
        return self.emit.read(self._seen(token), word(0), ir.VectorType(INT8, BLOCK), 1)

    def _any(self, mask: Value) -> Value:
        bits = ir.IntType(8 * BLOCK)
        return self.b.icmp_unsigned("!=", self.b.bitcast(mask, bits), ir.Constant(bits, 0))

    def _rows(self, source: Value, start: Value, count: Value) -> Value:
        """Returns rows of a block in float32, padded to `padded` numbers and with rows of zeros."""
        b, emit = self.b, self.emit
        base, apart = source, self.work.page is not None and self.work.page % BLOCK > 0
        source = self._slot(base, start)

        def copy() -> None:
            with emit.loop(word(0), count, 1) as (i, _, _):
                if apart:  # a block has several pages
                    place = self._slot(base, b.add(start, i))
                else:
                    place = b.gep(source, [b.mul(i, word(self.dim))])
                self._copy(place, b.gep(self.block, [b.mul(i, word(self.padded))]))
            used = b.mul(count, word(self.padded))
            with emit.loop(used, word(BLOCK * self.padded), self.lanes) as (i, _, _):
                emit.write(zeros(self.vector), self.block, i, 4)

        if self.work.dtype != "float32" or self.dim != self.padded or apart:
            copy()
            return self.block
        whole = b.icmp_signed("==", count, word(BLOCK))
        with b.if_then(b.not_(whole)):
            copy()
        return b.select(whole, source, self.block)

    def _slot(self, base: Value, slot: Value) -> Value:
        """Returns the address of a slot's row, in all keys or values."""
        b, page = self.b, self.work.page
        if page is None:
            return b.gep(base, [b.mul(slot, word(self.dim))])
        number = self.emit.read(self.table, b.sdiv(slot, word(page)), INT32, 4)
        pair = b.add(b.mul(b.sext(number, WORD), self.key_heads), self.key_head)
        row = b.add(b.mul(pair, word(page)), b.srem(slot, word(page)))
        return b.gep(base, [b.mul(row, word(self.dim))])

    def _copy(
        self, source: Value, target: Value, change: Callable[[Value], Value] | None = None
    ) -> None:
        """Copies one row in float32, changed, with zeros after it."""
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

    def _of(self, base: Value, token: Value, row: Value) -> Value:
        """Returns the address of a query or its result, in a buffer [B, N, H, dim]."""
        b = self.b
        first = b.mul(b.add(b.mul(self.row, self.width), token), self.heads)
        head = b.add(self.first_head, b.srem(row, self.groups))
        return b.gep(base, [b.mul(b.add(first, head), word(self.dim))])

    def _times(self, x: Value, scale: Value) -> Value:
        return self.b.fmul(x, self.emit.splat(scale, x.type.count))
