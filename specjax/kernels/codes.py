"""A product of few rows with codes of 4 or 8 bits, whose scales are by group, as parts of outputs.

    y[m, o] = sum over the groups g of scale[o, g] * sum over i in g of x[m, i] * number[o, i]

A vector of codes becomes numbers in registers.  So a step reads each code from memory once, and no
wide number is written.  Numbers are float32, and the order of a sum depends on the matrix alone.

In 4 bits a word of 32 bits has the codes of 8 neighbouring inputs, and a vector of `lanes` words is
a block.  Shifted by 4j bits, its lanes have the codes of the inputs 8 * lane + j.  The activations
are written in that order before they are multiplied, for all outputs of a part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.coding import ALL, Coding, Piece
from specjax.kernels.columns import share_of
from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, WORD, Emitter, Value, word
from specjax.kernels.forms import Machine, Operands
from specjax.kernels.orders import AHEAD, apart
from specjax.kernels.panels import TILE, WIDE, Panels
from specjax.kernels.pieces import Piece as Part

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of e2m1 that are not negative."""

_SHARES = 2
"""Parts for each thread, so that a thread that begins late does less."""

MANY = 64
"""More rows are multiplied in panels by processors for which a matrix has several streams."""

_UNROLLED = 4
"""The most blocks of a group that are written without a loop."""

_HIGH = 2.0**28
"""What a code of 4 bits is multiplied by if it lies in the highest bits of a word."""


@dataclasses.dataclass(frozen=True)
class Codes:
    """The `sharing.Work` of y [rows, tokens, outputs] = x [rows, tokens, inner] @ a matrix.

    Its buffers are x in float32; codes [E, outputs, bytes], scales and, if there are some, zeros
    [E, outputs, groups]; the number of the matrix; and y in float32.
    """

    coding: Coding
    machine: Machine

    @property
    def buffers(self) -> int:
        return 5 if self.coding.zeros is None else 6

    @property
    def name(self) -> str:
        return self.coding.name

    @property
    def sizes(self) -> Sequence[tuple[int, int]]:
        """Returns the sizes of rows, tokens, inner, outputs and groups."""
        return (0, 0), (0, 1), (0, 2), (1, 1), (2, 2)

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        rows, tokens, inner, outputs, _ = sizes
        return emit.b.mul(emit.b.mul(inner, outputs), emit.b.mul(rows, tokens))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return emit.least(emit.b.mul(threads, word(_SHARES)), worth)

    @property
    def matrix(self) -> Sequence[ir.Type]:
        """Returns the elements of codes, scales and zeros."""
        zeros = [] if self.coding.zeros is None else [INT8]
        return [INT8, _KINDS[self.coding.scales], *zeros]

    @property
    def pieces(self) -> Sequence[Part]:
        places = [kind.as_pointer() for kind in (FLOAT, *self.matrix, INT32, FLOAT)]
        name, arguments = f"{self.name}_{self.machine.name}_part", (*places, *[WORD] * 7)
        return (Part(name, arguments, self.buffers, self.write_part),)

    def function(self, module: ir.Module) -> ir.Function:
        return self.pieces[0].declare(module)

    def write_part(self, function: ir.Function) -> None:
        _Part(self, function).write_all()


_KINDS = {
    "float32": FLOAT, "bfloat16": INT16, "float16": ir.HalfType(), "uint8": INT8,
    "float8_e4m3fn": INT8,
}  # fmt: skip
"""The elements of scales."""

_SIZES = {FLOAT: 4, INT8: 1}
"""Their bytes, if they are not 2."""

_FP8 = 2.0**8
"""What numbers of e4m3 are more than those of float16 with their bits."""


def _like(value: Value, kind: ir.Type) -> Any:
    """Returns the type of a value whose elements are of `kind`."""
    many = isinstance(value.type, ir.VectorType)
    return ir.VectorType(kind, value.type.count) if many else kind


class Beside:
    """Reads the arguments of a part, and what lies beside the codes: scales and zeros."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        self.coding, self.machine = work.coding, work.machine
        self.emit = Emitter(function)
        b: Any = self.emit.b
        self.b = b
        self.x, codes, scales, *zeros, number, self.y = function.args[: work.buffers]
        part, parts, rows, tokens, self.inner, self.outputs, self.groups = function.args[
            work.buffers :
        ]
        self.rows = b.mul(rows, tokens)
        self.width = b.sdiv(self.inner, word(8 // self.coding.bits))
        before = b.mul(b.sext(b.load(number), WORD), self.outputs)
        self.codes = b.gep(codes, [b.mul(before, self.width)])
        self.scales = b.gep(scales, [b.mul(before, self.groups)])
        self.zeros = b.gep(zeros[0], [b.mul(before, self.groups)]) if zeros else None
        self.first, self.last = share_of(self.emit, self.outputs, part, parts)
        # Products of whole numbers have a code of 4 bits less 8.
        self.rest = self.coding.offset - (8 if self.signs_codes else 0)

    @property
    def signs_codes(self) -> bool:
        """Returns whether codes of 4 bits are less 8 when they are multiplied."""
        return self.coding.bits == 4 and not self.coding.fp4

    @property
    def corrects(self) -> bool:
        """Returns whether something is subtracted from what is multiplied."""
        return self.zeros is not None or bool(self.rest)

    def scale_and_zero(
        self, output: Value, group: Value, count: int = 1
    ) -> tuple[Value, Value | None]:
        """Returns the scale of a group, and what is subtracted from the codes, or None.

        Those of `count` groups are vectors.
        """
        b = self.b
        at = b.add(b.mul(output, self.groups), group)
        scale = self._scale(self._numbers(self.scales, at, count))
        real = _like(scale, FLOAT)
        rest = constant_of(real, float(self.rest))
        if self.zeros is None:
            return scale, rest if self.rest else None
        zeros = self._numbers(self.zeros, at, count)
        wide = _like(zeros, INT32)
        zeros = b.sext(zeros, wide) if self.coding.zeros == "int8" else b.zext(zeros, wide)
        return scale, b.fadd(b.sitofp(zeros, real), rest)

    def scales_of(self, output: Value, count: int) -> Value:
        """Returns a vector with the scales of some outputs, each of which has one."""
        scales = self._numbers(self.scales, output, count)
        return self._scale(scales if count > 1 else self.emit.splat(scales, 1))

    def scales_of_some(self, output: Value, most: int, count: Value) -> Value:
        """Returns a vector with the scales of up to `most` outputs, each of which has one."""
        align = _SIZES.get(self.scales.type.pointee, 2)
        return self._scale(self.emit.read_some(self.scales, output, most, count, align))

    def _numbers(self, base: Value, at: Value, count: int) -> Value:
        """Reads the numbers of some groups: one, or a vector."""
        of = base.type.pointee
        kind = ir.VectorType(of, count) if count > 1 else of
        return self.emit.read(base, at, kind, _SIZES.get(of, 2))

    def _scale(self, scales: Value) -> Value:
        b, of = self.b, self.coding.scales
        if of == "float32":
            return scales
        if of == "bfloat16":
            return self.emit.widened(scales)
        real = _like(scales, FLOAT)
        if of == "float16":
            return b.fpext(scales, real)
        if of == "float8_e4m3fn":
            return b.fmul(self.of_fp8(scales), constant_of(real, _FP8))
        # A byte s is 2^(s - 127): it is the exponent of a float32 number.
        wide = _like(scales, INT32)
        shift = ir.Constant(wide, 23 if wide == INT32 else [23] * wide.count)
        return b.bitcast(b.shl(b.zext(scales, wide), shift), real)

    def of_fp8(self, codes: Value) -> Value:
        """Returns numbers of e4m3, over `_FP8`: float16 has them, subnormal ones too."""
        b, half = self.b, _like(codes, INT16)

        def constant(value: int) -> ir.Constant:
            return constant_of(half, value)

        wide = b.zext(codes, half)
        size = b.shl(b.and_(wide, constant(0x7F)), constant(7))
        bits = b.or_(size, b.shl(b.and_(wide, constant(0x80)), constant(8)))
        return b.fpext(b.bitcast(bits, _like(codes, ir.HalfType())), _like(codes, FLOAT))


def constant_of(kind: ir.Type, value: float) -> ir.Constant:
    """Returns a number, or a vector with it in every lane."""
    many = isinstance(kind, ir.VectorType)
    return ir.Constant(kind, [value] * kind.count if many else value)


class _Part(Beside):
    """Writes the instructions of one part."""

    def __init__(self, work: Codes, function: ir.Function) -> None:
        super().__init__(work, function)
        self.lanes = self.coding.lanes
        self.vector = ir.VectorType(FLOAT, self.lanes)

    @property
    def signs_codes(self) -> bool:
        return self.coding.bits == 4 and not self._by_table

    def write_all(self) -> None:
        b, emit, taken = self.b, self.emit, None
        if self.machine.streams > 1 and self.lanes == self.machine.lanes:
            self._multiply_panels()
        if self.coding.bits == 4:
            size = b.mul(b.mul(self.rows, self.inner), word(4))
            taken = b.call(emit.c("malloc"), [b.add(size, word(64))])
            address = emit.whole(b.add(b.ptrtoint(taken, WORD), word(63)), 64)
            self._arrange(b.inttoptr(address, FLOAT.as_pointer()))
        # With few rows more outputs pass at once, since each is read from another place in memory.
        # Registers hold the sums, and the table of the codes of 4 bits.
        wide, narrow = self.machine.registers >= 32, self.coding.bits == 4
        few, most = 2, 4 if narrow and not wide else 6
        outputs = (3 if narrow else 4) if wide else 2
        some = b.icmp_signed("<=", self.rows, word(few))
        middle = b.select(some, self.last, self.first)
        emit.tiles(self.first, middle, 4, self.rows, few, self._tile)
        emit.tiles(middle, self.last, outputs, self.rows, most, self._tile)
        if taken is not None:
            b.call(emit.c("free"), [taken])
        b.ret_void()

    def _multiply_panels(self) -> None:
        """Multiplies more than `MANY` rows with most outputs, and leaves the others to tiles.

        Codes are written as float32 numbers to a cache, and all rows are multiplied with these.
        """
        b, emit, lanes, width = self.b, self.emit, self.lanes, WIDE * self.lanes
        many = b.icmp_signed(">", self.rows, word(MANY))
        whole = b.add(self.first, emit.whole(b.sub(self.last, self.first), width))
        whole = b.select(many, whole, self.first)
        sizes = self.rows, self.inner, self.inner, self.width, self.outputs
        of = Operands(self.x, self.codes, self.y, *sizes)
        with emit.loop(self.first, whole, TILE) as (start, _, _):
            end = emit.least(b.add(start, word(TILE)), whole)
            with emit.loop(word(0), self.rows, 1) as (m, _, _):
                row = b.gep(self.y, [b.mul(m, self.outputs)])
                with emit.loop(start, end, lanes) as (j, _, _):
                    emit.write(ir.Constant(self.vector, None), row, j, 4)
            panels = Panels(emit, lanes, 1, of, start, end, ordered=False)
            with panels.turns() as (k, deep), emit.loop(start, end, width) as (j, _, _):
                with emit.loop(k, deep, self.coding.block) as (i, _, _):
                    at = panels.place(j, b.sub(i, k))
                    for v in range(0, width, lanes):
                        outputs = [b.add(j, word(v + c)) for c in range(lanes)]
                        for turn, numbers in self._decoded(outputs, i):
                            place = b.add(at, word(turn * width + v))
                            emit.write(numbers, panels.packed, place, 4)
        self.first = whole

    def _decoded(self, outputs: Sequence[Value], start: Value) -> Iterator[tuple[int, Value]]:
        """Makes the numbers of a block of inputs for some outputs, as many as a vector has lanes.

        Yields each input's index in the block, and a vector with its numbers for the outputs.
        """
        b, coding = self.b, self.coding
        group = b.sdiv(start, word(coding.group))
        place = b.sdiv(start, word(8 // coding.bits))
        rows = [b.gep(self.codes, [b.add(b.mul(each, self.width), place)]) for each in outputs]
        for piece in coding.pieces:
            beside = [self._beside(each, group, piece) for each in outputs]
            decoders = [
                self._decoder(row, zero) for row, (_, zero) in zip(rows, beside, strict=True)
            ]
            for j in piece.vectors:
                numbers = [
                    b.fmul(decode(j), scale)
                    for decode, (scale, _) in zip(decoders, beside, strict=True)
                ]
                for lane, vector in enumerate(self.emit.turned(numbers)):
                    # With 4 bits the word of a lane holds 8 inputs, and vector j the j-th of each.
                    yield 8 * lane + j if coding.bits == 4 else j * self.lanes + lane, vector

    def _arrange(self, to: Value) -> None:
        """Writes the activations in the order of the codes of 4 bits."""
        b, emit, block = self.b, self.emit, self.coding.block
        whole = ir.VectorType(FLOAT, block)
        with emit.loop(word(0), b.mul(self.rows, self.inner), block) as (at, _, _):
            read = emit.read(self.x, at, whole, 4)
            for j in range(8):
                mine = emit.lanes(read, range(j, block, 8))
                emit.write(mine, to, b.add(at, word(j * self.lanes)), 4)
        self.x = to

    def _tile(self, i: Value, outputs: int, m: Value, rows: int) -> None:
        """Computes the products of some rows with some outputs."""
        b, emit, coding, lanes = self.b, self.emit, self.coding, self.lanes
        mine = [b.add(m, word(j)) for j in range(rows)]
        streams = self.machine.streams
        columns = apart(emit, streams, self.first, self.last, i, outputs)
        activations = [b.gep(self.x, [b.mul(j, self.inner)]) for j in mine]
        codes = [b.gep(self.codes, [b.mul(j, self.width)]) for j in columns]
        ahead = b.mul(self.width, word(outputs)) if streams == 1 else word(AHEAD)
        empty = [ir.Constant(self.vector, None)] * (rows * outputs)

        def add(start: Value, piece: Piece, zeros: list[Value | None], sums: list[Value]) -> None:
            """Adds the products of a piece of a block to sums; None stands for a new sum."""
            place = b.sdiv(start, word(8 // coding.bits))
            if piece.vectors.start == 0:
                for each in codes:
                    emit.prefetch(b.gep(each, [b.add(place, ahead)]))
            at = [b.gep(each, [place]) for each in codes]
            decoders = [self._decoder(*each) for each in zip(at, zeros, strict=True)]
            for j in piece.vectors:
                numbers = [decode(j) for decode in decoders]
                for r, activation in enumerate(activations):
                    row = emit.read(activation, b.add(start, word(j * lanes)), self.vector, 4)
                    for c, number in enumerate(numbers):
                        k = r * outputs + c
                        sums[k] = (
                            b.fmul(number, row)
                            if sums[k] is None
                            else emit.multiply_add(number, row, sums[k])
                        )

        def add_span(begin: Value, end: Value, blocks: int, totals: list[Value]) -> list[Value]:
            """Returns totals with the products of a group of inputs, or of a block of groups."""
            group = b.sdiv(begin, word(coding.group))
            for piece in coding.pieces:
                beside = [self._beside(j, group, piece) for j in columns]
                zeros = [zero for _, zero in beside]
                sums: list[Value] = [None] * (rows * outputs)
                if blocks <= _UNROLLED and not coding.cut:
                    for i in range(blocks):
                        add(b.add(begin, word(i * coding.block)), piece, zeros, sums)
                else:
                    with emit.loop(begin, end, coding.block, empty) as (start, sums, following):
                        found = list(sums)
                        add(start, piece, zeros, found)
                        following[:] = found
                totals = [
                    emit.multiply_add(one, beside[k % outputs][0], totals[k])
                    for k, one in enumerate(sums)
                ]
            return totals

        if coding.group == ALL:
            now = add_span(word(0), self.inner, coding.group, empty)
        else:
            span = max(coding.block, coding.group)
            with emit.loop(word(0), self.inner, span, empty) as (begin, now, following):
                end = b.add(begin, word(span))
                end = emit.least(end, self.inner) if coding.cut else end
                following[:] = add_span(begin, end, span // coding.block, list(now))
        for k, total in enumerate(now):
            r, c = divmod(k, outputs)
            place = b.add(b.mul(mine[r], self.outputs), columns[c])
            emit.write(emit.sum(total), self.y, place, 4)

    def _beside(self, output: Value, group: Value, piece: Piece) -> tuple[Value, Value | None]:
        """Returns the scales of the lanes, and what is subtracted from the codes, or None."""
        b, emit = self.b, self.emit
        group = b.add(group, word(piece.first))
        scale, zero = self.scale_and_zero(output, group, piece.count)
        scale = self._spread(scale, piece)
        zero = None if zero is None else self._spread(zero, piece)
        if self.coding.fp8:
            scale = b.fmul(scale, emit.constant(_FP8, self.lanes))
        if self.signs_codes:  # which lie in the highest bits of a word
            scale = b.fmul(scale, emit.constant(1 / _HIGH, self.lanes))
            zero = None if zero is None else b.fmul(zero, emit.constant(_HIGH, self.lanes))
        return scale, zero

    def _spread(self, numbers: Value, piece: Piece) -> Value:
        """Returns a vector with the number of each lane's group."""
        if piece.count == 1:
            return self.emit.splat(numbers, self.lanes)
        return self.emit.lanes(
            numbers, [lane * piece.count // self.lanes for lane in range(self.lanes)]
        )

    @property
    def _by_table(self) -> bool:
        """Returns whether the numbers of 4 bits are taken from a register by their codes."""
        return self.coding.bits == 4 and self.coding.lanes == 16

    def _decoder(self, codes: Value, zeros: Value | None) -> Any:
        """Returns a function that makes vector j of the numbers of a block."""
        b, emit, lanes = self.b, self.emit, self.lanes
        words = ir.VectorType(INT32, lanes)

        def less(numbers: Value) -> Value:
            return numbers if zeros is None else b.fsub(numbers, zeros)

        def constant(value: int) -> ir.Constant:
            return ir.Constant(words, [value] * lanes)

        if self.coding.bits == 8:

            def of_bytes(j: int) -> Value:
                read = emit.read(codes, word(j * lanes), ir.VectorType(INT8, lanes), 1)
                if self.coding.fp8:
                    return self.of_fp8(read)
                wide = b.sext if self.coding.signed else b.zext
                return less(b.sitofp(wide(read, words), self.vector))

            return of_bytes
        read = emit.read(b.bitcast(codes, INT32.as_pointer()), word(0), words, 1)
        if self._by_table:
            numbers = (*FP4, *(-each for each in FP4)) if self.coding.fp4 else range(16)
            table = ir.Constant(self.vector, [float(each) for each in numbers])
            one = len(self.coding.pieces) == 1 and self.coding.group >= self.coding.block
            if one:  # of a block that has one zero
                table = less(table)

            def of_table(j: int) -> Value:
                made = emit.looked_up(table, b.lshr(read, constant(4 * j)) if j else read)
                return made if one else less(made)

            return of_table
        signed = b.xor(read, constant(0x88888888))

        def of_words(j: int) -> Value:
            high = b.shl(signed, constant(28 - 4 * j)) if j < 7 else signed
            return less(b.sitofp(b.and_(high, constant(-(2**28))), self.vector))

        return of_words
