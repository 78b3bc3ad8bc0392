"""The decoder layers of a pass over few tokens, all in one call.

    read    = norm(x)                                  x: the stream before the layer
    q, k, v = read Wq, read Wk, read Wv                phase 0, by columns
    mixed   = attention(rope(norm(q)), rope(norm(k)), v)    1, by rows of the batch and key heads
    between = x + mixed Wo                             phase 2, by columns
    inner   = act(norm(between) Wg) * (norm(between) Wu)    3, by columns
    x       = between + inner Wd                       phase 4, by columns

A part of a phase waits until the phases before it are done, and XLA plans one operation in the
place of some forty for each layer.  Norms are computed again in each part, since they are short.
The bits of a token depend on its row alone, as those of products and of attention do.

With matrices in bfloat16 the kernel rounds at the same places as XLA's program of the layers one by
one: what a phase writes, the parts of an activation function, and norms before their weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from specjax.kernels.attending import Attention
from specjax.kernels.coded import work_of
from specjax.kernels.codes import Codes
from specjax.kernels.coding import ALL, ROUNDED_ROWS
from specjax.kernels.columns import share_of
from specjax.kernels.digits import Digits
from specjax.kernels.emitting import (
    FLOAT,
    INT8,
    INT16,
    INT32,
    WORD,
    Emitter,
    Read,
    Value,
    word,
    zeros,
)
from specjax.kernels.forms import FORMS, Machine, Operands
from specjax.kernels.functions import exponential, tangent
from specjax.kernels.halves import Halved, multiply_half, pairs, which
from specjax.kernels.layer_forms import MATRICES, LayersForm
from specjax.kernels.loops import loops
from specjax.kernels.pieces import Piece
from specjax.kernels.sharing import part_of, wait_for

PHASES = 5
_SHARES = 1
"""Parts of a phase for each thread."""

_WORTH = 2**16
"""The multiplications of the products of a phase for which a further part pays."""


ARGUMENTS = "x", "read", "cosines", "sines", "visible", "numbers", "starts", "counts"
TABLE = "table"
"""The last argument of a form with pages."""

RESULTS = "streams", "q", "k", "v", "mixed", "between", "inner", "up"
"""The buffers that no layer has for itself; those from "q" on are memory for the phases."""


class Sizes(NamedTuple):
    """The sizes that the work depends on."""

    batch: Any
    width: Any
    embed: Any
    read: Any  # the numbers that queries are made from
    turned: Any  # half of the dimensions that are rotated
    masks: Any
    slots: Any
    layers: Any
    heads: Any
    key_heads: Any
    inner: Any

    @property
    def of_attention(self) -> tuple[Any, ...]:
        return self.batch, self.width, self.heads, self.key_heads, self.slots, self.masks


_PLACES = {
    "batch": ("x", 0), "width": ("x", 1), "embed": ("x", 2), "read": ("read", 2),
    "turned": ("cosines", 3), "masks": ("visible", 0), "slots": ("visible", 2),
    "layers": ("streams", 0), "heads": ("q", 2), "key_heads": ("k", 2), "inner": ("inner", 2),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layers:
    """The `sharing.Phased` work of the layers.

    Its arguments are x [B, N, E], read [B, N, F], cosines and sines [B, N, 1, R / 2], visible
    [B or 1, N, S], numbers [4] (scale, softcap, eps, and what is added to the weights of norms),
    and in int32 starts [B], the slot of the first token, and counts [B]: if there is one row, it is
    computed for so many tokens, and what the results hold for the others means nothing.  With pages
    there is also the table [B, T] in int32 of each row's pages, of which 0 is never written.  Its
    results are streams [L, B, N, E] after each layer, and memory: q and mixed [B, N, H, D], k and v
    [B, N, K, D], between [B, N, E], inner and up [B, N, I].  Numbers are float32, and `visible` is
    bool.
    """

    form: LayersForm
    machine: Machine
    vnni: bool = True  # for codes: as in `RoundedCodes`

    results = len(RESULTS)
    name = "layers"

    @property
    def order(self) -> tuple[str, ...]:
        """Returns the names of the buffers that no layer has for itself."""
        return (*ARGUMENTS, *[TABLE] * (self.form.page is not None), *RESULTS)

    @property
    def buffers(self) -> int:
        return len(self.order)

    @property
    def each(self) -> tuple[int, int]:
        return len(self.form.names), 2

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        return [(self.order.index(buffer), axis) for buffer, axis in _PLACES.values()]

    @property
    def attention(self) -> Attention:
        form = self.form
        return Attention(form.dtype, form.dim, form.capped, self.machine, form.page)

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        b, s = emit.b, Sizes(*sizes)
        return b.mul(self._of_phase(emit, s), word(PHASES))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        b, s = emit.b, Sizes(*sizes)
        some, mixes = self.shares(emit, s, threads)
        return b.mul(s.layers, b.add(b.mul(some, word(PHASES - 1)), mixes))

    def shares(self, emit: Emitter, s: Sizes, threads: Value) -> tuple[Value, Value]:
        """Returns the number of parts of a phase of products, and that of attention."""
        b = emit.b
        worth = b.add(b.sdiv(self._of_phase(emit, s), word(_WORTH)), word(1))
        some = emit.least(worth, b.mul(threads, word(_SHARES)))
        if self.halved:
            some = pairs(emit, some)
        return some, self.attention.parts(emit, s.of_attention, emit.least(some, threads), worth)

    @property
    def halved(self) -> bool:
        """Returns whether a part multiplies with half of the inputs; see `halves.py`.

        Then the parts of the second half also compute what follows the products of a phase.
        """
        return not self.codes and FORMS[self.form.weight].by_columns and self.machine.halves == 2

    def _of_phase(self, emit: Emitter, s: Sizes) -> Value:
        b = emit.b
        return b.mul(b.mul(s.embed, s.inner), b.mul(s.batch, s.width))

    @property
    def pieces(self) -> Sequence[Piece]:
        """Returns attention, and the products; of codes that of each matrix."""
        if self.codes:
            products = [piece for work in self.codes.values() for piece in work.pieces]
            return *self.attention.pieces, *products
        return *self.attention.pieces, loops(FORMS[self.form.weight], self.machine)

    @property
    def codes(self) -> dict[str, Codes]:
        """Returns the products with matrices of codes and of int8, by their names."""

        int8 = self.form.weight == "int8"
        codings = (ROUNDED_ROWS,) * len(MATRICES) if int8 else self.form.codings
        works = (work_of(coding, self.machine, self.vnni) for coding in codings)
        return dict(zip(MATRICES, works, strict=False))

    def function(self, module: ir.Module) -> ir.Function:
        others = {"visible": INT8, "starts": INT32, "counts": INT32, TABLE: INT32}
        places = [others.get(name, FLOAT) for name in self.order]
        function = part_of(module, self.name, [*places, WORD, WORD], 3 + len(_PLACES))
        _Part(self, module, function).write_all()
        return function


def _as_it_is(value: Value) -> Value:
    return value


class _Part:
    """Writes the instructions of one part."""

    def __init__(self, work: Layers, module: ir.Module, function: ir.Function) -> None:
        self.form, self.lanes, self.codes = work.form, work.machine.lanes, work.codes
        self.halved = work.halved
        self.narrow_floats = work.form.dtype == "bfloat16"
        self.element = INT16 if self.narrow_floats else FLOAT  # of what a layer has for itself
        self.vector = ir.VectorType(FLOAT, self.lanes)
        self.attention, *others = (piece.declare(module) for piece in work.pieces)
        self.multiply = others[0]  # of matrices that are no codes
        self.pieces = {
            name: [piece.declare(module) for piece in product.pieces]
            for name, product in self.codes.items()
        }
        self.emit = Emitter(function)
        b: Any = self.emit.b
        self.b = b
        self.head = b.bitcast(b.alloca(ir.ArrayType(FLOAT, self.form.dim)), FLOAT.as_pointer())
        self.only = b.alloca(INT32)  # the number of a matrix in its stack
        b.store(ir.Constant(INT32, 0), self.only)
        count = work.buffers
        held = zip(work.order, function.args[:count], strict=True)
        self.of: dict[str, Value] = dict(held)
        self.done, table, threads, part, parts, *sizes = function.args[count:]
        s = Sizes(*sizes)
        size = b.mul(b.mul(s.batch, s.width), s.embed)  # of a stream
        self.some, self.mixes = work.shares(self.emit, s, threads)
        count = b.sext(self.emit.read(self.of["counts"], word(0), INT32, 4), WORD)
        one = b.icmp_signed("==", s.batch, word(1))
        s = self.s = s._replace(width=b.select(one, count, s.width))
        self.rows = b.mul(s.batch, s.width)
        self.wide, self.narrow = (
            b.mul(heads, word(self.form.dim)) for heads in (s.heads, s.key_heads)
        )
        of_layer = b.sdiv(parts, s.layers)
        layer, self.at = b.sdiv(part, of_layer), b.srem(part, of_layer)
        self.before = self.begin = b.sub(part, self.at)  # of the layer, and of a phase
        self.own = b.gep(table, [b.mul(layer, word(sum(work.each)))])
        first = b.icmp_signed("==", layer, word(0))
        last = b.gep(self.of["streams"], [b.mul(b.sub(layer, word(1)), size)])
        self.x = b.select(first, self.of["x"], last)
        self.next = b.gep(self.of["streams"], [b.mul(layer, size)])
        self.eps, self.offset = (self.number(i) for i in (2, 3))

    def number(self, index: int) -> Value:
        return self.emit.read(self.of["numbers"], word(index), FLOAT, 4)

    def buffer(self, name: str, kind: ir.Type | None = None) -> Value:
        """Returns the address of an argument of the layer; caches are those of its results."""
        names = self.form.names
        at = names.index(name) + (2 if name in ("keys", "values") else 0)
        address = self.b.load(self.b.gep(self.own, [word(at)]))
        return self.b.inttoptr(address, (kind or self.element).as_pointer())

    def kept(self, value: Value) -> Value:
        """Returns float32 numbers as the form keeps them: rounded, if it is in bfloat16."""
        return self.emit.widened(self.emit.narrowed(value)) if self.narrow_floats else value

    def write_all(self) -> None:
        b, begin = self.b, word(0)
        phases = (self._project, self._mix, self._add_mixed, self._widen, self._add_inner)
        for number, phase in enumerate(phases):
            size = self.mixes if number == 1 else self.some
            end = b.add(begin, size)
            mine = b.icmp_signed("<", self.at, end)
            mine = b.and_(mine, b.icmp_signed(">=", self.at, begin))
            with b.if_then(mine):
                self.begin = b.add(self.before, begin)
                wait_for(self.emit, self.done, self.begin)
                phase(b.sub(self.at, begin))
            begin = end
        b.ret_void()

    def _project(self, part: Value) -> None:
        """Writes queries, keys and values."""
        read, taken = self.of["read"], None
        if self.form.normed:
            read, taken = self._normed(self.x, "attention_norm")
        s = self.s
        each = [
            (name, self.of[name], count)
            for name, count in (("q", self.wide), ("k", self.narrow), ("v", self.narrow))
        ]
        self._products(read, s.read, each, part)
        if taken is not None:
            self.b.call(self.emit.c("free"), [taken])

    def _mix(self, part: Value) -> None:
        """Prepares queries, stages keys and values, and attends, for one key head of a row."""
        b, emit, s = self.b, self.emit, self.s
        of_row = b.sdiv(self.mixes, s.batch)
        groups = b.sdiv(s.heads, of_row)
        row, of_heads = b.sdiv(part, of_row), b.srem(part, of_row)
        first_head = b.mul(of_heads, groups)
        key_head = b.sdiv(b.mul(of_heads, s.key_heads), of_row)
        start = b.sext(emit.read(self.of["starts"], row, INT32, 4), WORD)
        if self.form.page is None:
            # As XLA's slices, which lie within an array wherever they are asked to begin.
            start = emit.least(start, b.sub(s.slots, s.width))
            start = b.select(b.icmp_signed(">", start, word(0)), start, word(0))
        keys, values = self.buffer("keys"), self.buffer("values")
        dim = word(self.form.dim)
        with emit.loop(word(0), s.width, 1) as (token, _, _):
            number = b.add(b.mul(row, s.width), token)
            slot, exists = self._slot(row, key_head, b.add(start, token))
            at = b.add(b.mul(number, s.key_heads), key_head)
            for name, cache in (("k", keys), ("v", values)):
                held, place = (
                    b.gep(self.of[name], [b.mul(at, dim)]),
                    b.gep(cache, [b.mul(slot, dim)]),
                )
                # What belongs nowhere is written over what nobody reads again.
                nowhere = b.bitcast(held, place.type)
                place = place if exists is None else b.select(exists, place, nowhere)
                self._prepare(name, held, key_head, number, place)
            with emit.loop(first_head, b.add(first_head, groups), 1) as (head, _, _):
                at = b.add(b.mul(number, s.heads), head)
                held = b.gep(self.of["q"], [b.mul(at, dim)])
                self._prepare("q", held, head, number, held)
        places = [self.of["q"], keys, values, self.of["visible"], self.of["numbers"]]
        places += [] if self.form.page is None else [self.of[TABLE]]
        sizes = [part, self.mixes, *s.of_attention]
        b.call(self.attention, [*places, self.of["mixed"], *sizes])
        if not self.narrow_floats:
            return
        with emit.loop(word(0), s.width, 1) as (token, _, _):
            number = b.add(b.mul(row, s.width), token)
            at = b.mul(b.add(b.mul(number, s.heads), first_head), dim)
            self._keep(self.of["mixed"], at, b.add(at, b.mul(groups, dim)))

    def _slot(self, row: Value, key_head: Value, slot: Value) -> tuple[Value, Value | None]:
        """Returns where a slot of a row lies, in heads of keys, and whether it has a page."""
        b, s, page = self.b, self.s, self.form.page
        if page is None:
            pair = b.add(b.mul(row, s.key_heads), key_head)
            return b.add(b.mul(pair, s.slots), slot), None
        pages, index = b.sdiv(s.slots, word(page)), b.sdiv(slot, word(page))
        within = b.icmp_signed("<", index, pages)
        index = b.select(within, index, word(0))
        at = b.add(b.mul(row, pages), index)
        number = b.sext(self.emit.read(self.of[TABLE], at, INT32, 4), WORD)
        pair = b.add(b.mul(number, s.key_heads), key_head)
        exists = b.and_(within, b.icmp_signed(">", number, word(0)))
        return b.add(b.mul(pair, word(page)), b.srem(slot, word(page))), exists

    def _prepare(self, name: str, held: Value, head: Value, number: Value, place: Value) -> None:
        """Writes one head of a token to `place`, after its bias, its norm and its rope."""
        b, emit, form = self.b, self.emit, self.form
        dim = word(form.dim)
        bias = b.gep(self.buffer(f"{name}_bias"), [b.mul(head, dim)]) if form.biased else None

        def begin(i: Value, read: Read) -> None:
            x = read(held, i)
            emit.write(x if bias is None else self.kept(b.fadd(x, read(bias, i))), self.head, i, 4)

        self._each(word(0), dim, begin)
        if name == "v":
            self._copy(self.head, place)
            return
        if form.head_norms:
            self._norm(self.head, self.buffer(f"{name}_norm"), self.head, dim)
        half = self.s.turned
        cosines, sines = (
            b.gep(self.of[table], [b.mul(number, half)]) for table in ("cosines", "sines")
        )

        def turn(i: Value, read: Read) -> None:
            other = b.add(i, half)
            first, second, cosine, sine = (
                read(*at) for at in ((self.head, i), (self.head, other), (cosines, i), (sines, i))
            )
            turned = b.fsub(b.fmul(first, cosine), b.fmul(second, sine))
            emit.write(turned, self.head, i, 4)
            turned = b.fadd(b.fmul(second, cosine), b.fmul(first, sine))
            emit.write(turned, self.head, other, 4)

        self._each(word(0), half, turn)
        self._copy(self.head, place)

    def _copy(self, source: Value, place: Value) -> None:
        def one(i: Value, read: Read) -> None:
            value = read(source, i)
            if place.type.pointee == INT16:
                self.emit.write(self.emit.narrowed(value), place, i, 2)
            else:
                self.emit.write(self.kept(value), place, i, 4)

        self._each(word(0), word(self.form.dim), one)

    def _add_mixed(self, part: Value) -> None:
        """Writes the stream after attention."""
        s, between = self.s, self.of["between"]
        self._products(self.of["mixed"], self.wide, [("o", between, s.embed)], part)
        # In XLA's program the norm reads this sum before it is rounded.
        self._add(self.x, between, part, _as_it_is)

    def _widen(self, part: Value) -> None:
        """Writes what `down` reads."""
        b, emit, s = self.b, self.emit, self.s
        read, taken = self._normed(self.of["between"], "mlp_norm")
        inner, up = self.of["inner"], self.of["up"]
        self._products(read, s.embed, [("gate", inner, s.inner), ("up", up, s.inner)], part)
        b.call(emit.c("free"), [taken])

        def activate(i: Value, read: Read) -> None:
            active = b.fmul(self._activated(read(inner, i)), read(up, i))
            emit.write(self.kept(active), inner, i, 4)

        self._each_row(s.inner, part, activate)

    def _add_inner(self, part: Value) -> None:
        """Writes the stream after the layer."""
        s = self.s
        self._products(self.of["inner"], s.inner, [("down", self.next, s.embed)], part)
        self._add(self.of["between"], self.next, part, self.kept)

    def _add(self, x: Value, y: Value, part: Value, kept: Callable[[Value], Value]) -> None:
        """Adds columns of x to y; `kept` rounds x and the sum."""

        def add(i: Value, read: Read) -> None:
            self.emit.write(kept(self.b.fadd(kept(read(x, i)), read(y, i))), y, i, 4)

        self._each_row(self.s.embed, part, add)

    def _products(
        self, x: Value, inner: Value, each: Sequence[tuple[str, Value, Value]], part: Value
    ) -> None:
        """Multiplies all rows with the columns of a part of some matrices; digits of the rows are
        made once for those in the same layout.

        Args:
          x: the rows, [rows, inner].
          inner: their size.
          each: the name of each matrix, the address of its products, and its columns.
          part: the number of the part.
        """
        if self.halved:
            self._halves(x, inner, each, part)
            return
        b, made, memory = self.b, None, None
        for name, y, count in each:
            work, source = self.codes.get(name), x
            if isinstance(work, Digits):
                if work != made:
                    if memory is not None:
                        b.call(self.emit.c("free"), [memory])
                    room = work.room(self.emit, self.rows, inner)
                    made, memory = work, b.call(self.emit.c("malloc"), [room])
                    b.call(self.pieces[name][0], [x, memory, self.rows, inner])
                source = b.bitcast(memory, FLOAT.as_pointer())
            self._product(source, inner, name, y, count, part)
        if memory is not None:
            b.call(self.emit.c("free"), [memory])

    def _halves(
        self, x: Value, inner: Value, each: Sequence[tuple[str, Value, Value]], part: Value
    ) -> None:
        """Multiplies as `_products`, with half of the inputs."""
        mine = which(self.emit, part, self.some)
        kind, products = FORMS[self.form.weight].weight, []
        for name, y, count in each:
            of = Operands(x, self.buffer(name, kind), y, self.rows, inner, inner, count, count)
            share = share_of(self.emit, count, mine.share, mine.shares)
            products.append(Halved(self.multiply, of, *share))
        multiply_half(self.emit, products, mine, self.done, self.begin, self.lanes)

    def _product(
        self, x: Value, inner: Value, name: str, y: Value, count: Value, part: Value
    ) -> None:
        """Multiplies all rows with the columns of a part."""
        b = self.b
        if self.codes:
            work, groups = self.codes[name], word(1)
            if (group := work.coding.group) != ALL:
                groups = b.sdiv(b.add(inner, word(group - 1)), word(group))
            held = zip(self.form.parts(name), work.matrix, strict=True)
            matrix = [self.buffer(name + part, kind) for part, kind in held]
            sizes = self.s.batch, self.s.width, inner, count, groups
            multiply = self.pieces[name][-1]
            b.call(multiply, [x, *matrix, self.only, y, part, self.some, *sizes])
            return
        share = share_of(self.emit, count, part, self.some)
        matrix = self.buffer(name, FORMS[self.form.weight].weight)
        b.call(self.multiply, [x, matrix, y, *share, self.rows, inner, inner, count, count])
        if self.narrow_floats:
            with self.emit.loop(word(0), self.rows, 1) as (row, _, _):
                begin = b.mul(row, count)
                self._keep(y, *(b.add(begin, end) for end in share))

    def _keep(self, y: Value, start: Value, stop: Value) -> None:
        """Rounds y[start:stop] as the form keeps numbers."""
        self._each(start, stop, lambda i, read: self.emit.write(self.kept(read(y, i)), y, i, 4))

    def _normed(self, x: Value, name: str) -> tuple[Value, Value]:
        """Returns the norms of all rows, and the memory that is to be freed."""
        b, size = self.b, self.s.embed
        taken = b.call(self.emit.c("malloc"), [b.mul(b.mul(self.rows, size), word(4))])
        normed, weight = b.bitcast(taken, FLOAT.as_pointer()), self.buffer(name)
        with self.emit.loop(word(0), self.rows, 1) as (row, _, _):
            at = [b.mul(row, size)]
            self._norm(b.gep(x, at), weight, b.gep(normed, at), size)
        return normed, taken

    def _norm(self, x: Value, weight: Value, y: Value, size: Value) -> None:
        """Writes the RMS norm of one row; x and y may be the same."""
        b, emit = self.b, self.emit
        whole = emit.whole(size, self.lanes)
        with emit.loop(word(0), whole, self.lanes, [zeros(self.vector)]) as (i, now, following):
            read = emit.read(x, i, self.vector, 4)
            following[0] = emit.multiply_add(read, read, now[0])
        with emit.loop(whole, size, 1, [emit.sum(now[0])]) as (i, total, following):
            read = emit.read(x, i, FLOAT, 4)
            following[0] = emit.multiply_add(read, read, total[0])
        mean = b.fadd(b.fdiv(total[0], b.sitofp(size, FLOAT)), self.eps)
        factor = b.fdiv(ir.Constant(FLOAT, 1.0), emit.root(mean))

        def scale(i: Value, read: Read) -> None:
            value = read(x, i)
            normed = b.fmul(value, self._like(factor, value))
            if self.narrow_floats:  # Llama rounds before the product with the weight, Gemma after
                exact = b.fcmp_ordered("!=", self.offset, ir.Constant(FLOAT, 0.0))
                normed = b.select(exact, normed, self.kept(normed))
            own = b.fadd(read(weight, i), self._like(self.offset, value))
            emit.write(self.kept(b.fmul(normed, own)), y, i, 4)

        self._each(word(0), size, scale)

    def _activated(self, x: Value) -> Value:
        """Returns the activation function of a number, or of a vector of them."""
        b, emit, kept = self.b, self.emit, self.kept
        if x.type == FLOAT:
            vector = self._activated(emit.splat(x, self.lanes))
            return b.extract_element(vector, ir.Constant(INT32, 0))

        def every(value: float) -> ir.Constant:
            return emit.constant(value, x.type.count)

        one = every(1.0)
        if self.form.activation == "gelu_tanh":  # x (1 + tanh(sqrt(2 / pi) (x + .044715 x^3))) / 2
            cube = kept(b.fmul(kept(b.fmul(x, x)), x))
            argument = kept(b.fadd(x, kept(b.fmul(kept(every(0.044715)), cube))))
            argument = kept(b.fmul(kept(every((2 / math.pi) ** 0.5)), argument))
            share = kept(b.fadd(one, kept(tangent(emit, argument))))
            return kept(b.fmul(x, kept(b.fmul(every(0.5), share))))
        positive = b.fcmp_ordered(">", x, every(0.0))
        small = exponential(emit, b.select(positive, b.fneg(x), x))  # e^-|x|
        if self.narrow_floats:  # as XLA computes x / (1 + e^-x)
            opposite = kept(b.select(positive, small, b.fdiv(one, small)))
            share = b.fdiv(one, kept(b.fadd(one, opposite)))
        else:
            share = b.fdiv(b.select(positive, one, small), b.fadd(one, small))
        return kept(b.fmul(x, kept(share)))

    def _like(self, number: Value, value: Value) -> Value:
        return number if value.type == FLOAT else self.emit.splat(number, self.lanes)

    def _each_row(self, count: Value, part: Value, do: Callable[[Value, Read], None]) -> None:
        """Writes `_each` for the columns of a part, in each row of [rows, count]."""
        if self.halved:
            mine = which(self.emit, part, self.some)
            with self.b.if_then(mine.second):
                share = share_of(self.emit, count, mine.share, mine.shares)
                self._each_of(count, share, do)
        else:
            self._each_of(count, share_of(self.emit, count, part, self.some), do)

    def _each_of(
        self, count: Value, share: tuple[Value, Value], do: Callable[[Value, Read], None]
    ) -> None:
        """Writes `_each` for the columns of a share."""
        b, (first, last) = self.b, share
        with self.emit.loop(word(0), self.rows, 1) as (row, _, _):
            begin = b.mul(row, count)
            self._each(b.add(begin, first), b.add(begin, last), do)

    def _each(self, start: Value, stop: Value, do: Callable[[Value, Read], None]) -> None:
        self.emit.each(start, stop, self.lanes, do)
