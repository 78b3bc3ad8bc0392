"""Loops and vectors in LLVM's intermediate language, written from Python.

llvmlite is optional (extra `[cpu]`), so only this room imports it, and only when a kernel is made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

Value = Any  # an instruction or a constant; llvmlite has no annotations

WORD, INT32, INT16, INT8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
FLOAT = ir.FloatType()

_LEAST = 0x0DA24260
"""The bits of 1e-30."""


Read = Callable[[Value, Value], Value]
"""Reads a number, or a vector of them, at an address and an index."""


def word(value: int) -> ir.Constant:
    return ir.Constant(WORD, value)


def zeros(kind: ir.Type) -> ir.Constant:
    return ir.Constant(kind, None)


def _suffix(kind: ir.Type) -> str:
    """Returns how the names of LLVM's intrinsics end for vectors of this type."""
    if isinstance(kind, ir.IntType):
        return f"i{kind.width}"
    return "f32" if kind == FLOAT else "f16"


class Emitter:
    """Writes instructions at the end of a function.  `b` is llvmlite's builder."""

    def __init__(self, function: ir.Function) -> None:
        self.b: Any = ir.IRBuilder(function.append_basic_block())

    @contextlib.contextmanager
    def loop(
        self, start: Value, stop: Value, step: int | Value, carried: Sequence[Value] = ()
    ) -> Iterator[tuple[Value, list[Value], list[Value]]]:
        """Writes `for i in range(start, stop, step)`, with values carried between its turns.

        Yields:
          i, the carried values, and a list in which the body puts the next ones.  After the loop
          the carried values are the last ones.
        """
        b = self.b
        before, head = b.block, b.append_basic_block()
        body, after = b.append_basic_block(), b.append_basic_block()
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(WORD)
        index.add_incoming(start, before)
        now = [b.phi(value.type) for value in carried]
        for phi, value in zip(now, carried, strict=True):
            phi.add_incoming(value, before)
        b.cbranch(b.icmp_signed("<", index, stop), body, after)
        b.position_at_end(body)
        following: list[Value] = list(now)
        yield index, now, following
        by = word(step) if isinstance(step, int) else step
        index.add_incoming(b.add(index, by), b.block)
        for phi, value in zip(now, following, strict=True):
            phi.add_incoming(value, b.block)
        b.branch(head)
        b.position_at_end(after)

    def tiles(
        self,
        first: Value,
        last: Value,
        outputs: int,
        rows: Value,
        most: int,
        tile: Callable[[Value, int, Value, int], None],
    ) -> None:
        """Writes `tile` for [first, last), `outputs` at once, and for groups of `most` rows.

        It gets the first output and their number, and the first row and their number.
        """
        many = self.b.add(first, self.whole(self.b.sub(last, first), outputs))
        groups = self.groups(rows, most)
        for low, high, width in ((first, many, outputs), (many, last, 1)):
            with self.loop(low, high, width) as (i, _, _):
                for group in groups:
                    with self.loop(*group) as (m, _, _):
                        tile(i, width, m, group[2])

    def each(
        self,
        start: Value,
        stop: Value,
        lanes: int,
        do: Callable[[Value, Read], None],
    ) -> None:
        """Writes `do` for range(start, stop), as vectors and then as the numbers that are left.

        `do` gets an index, and a function that reads float32 numbers at an address and an index.
        """
        end = self.b.add(start, self.whole(self.b.sub(stop, start), lanes))
        for low, high, many, step in ((start, end, lanes, lanes), (end, stop, None, 1)):
            with self.loop(low, high, step) as (i, _, _):
                do(i, lambda base, at, many=many: self.weights(base, at, many))

    def groups(self, count: Value, most: int) -> list[tuple[Value, Value, int]]:
        """Cuts range(count) into as few groups of at most `most` as can be, nearly equal in size.

        Returns:
          For each size, the start, stop and step with which `loop` visits the groups of that size.
        """
        b, start, groups = self.b, word(0), []
        number = b.sdiv(b.add(count, word(most - 1)), word(most))
        number = b.select(b.icmp_signed(">", number, word(1)), number, word(1))  # if count is 0
        size, larger = b.sdiv(count, number), b.srem(count, number)
        for each in range(most, 0, -1):
            mine = b.select(b.icmp_signed("==", size, word(each)), b.sub(number, larger), word(0))
            mine = b.select(b.icmp_signed("==", size, word(each - 1)), larger, mine)
            stop = b.add(start, b.mul(mine, word(each)))
            groups.append((start, stop, each))
            start = stop
        return groups

    def read(self, base: Value, index: Value, kind: ir.Type, align: int) -> Value:
        """Reads a scalar or a vector at base[index]; `align` is the size of an element in bytes."""
        loaded = self.b.load(self.b.bitcast(self.b.gep(base, [index]), kind.as_pointer()))
        loaded.align = align
        return loaded

    def weights(self, base: Value, index: Value, lanes: int | None) -> Value:
        """Reads `lanes` weights at base[index], or a single one for None, as float32 numbers.

        Pointers to INT16 are to bfloat16 numbers.
        """
        of = base.type.pointee
        kind = of if lanes is None else ir.VectorType(of, lanes)
        read = self.read(base, index, kind, 4 if of == FLOAT else 2)
        return read if of == FLOAT else self.widened(read)

    def write(self, value: Value, base: Value, index: Value, align: int) -> None:
        place = self.b.bitcast(self.b.gep(base, [index]), value.type.as_pointer())
        self.b.store(value, place).align = align

    def whole(self, value: Value, step: int) -> Value:
        """Returns the greatest multiple of `step` that is not above `value`."""
        return self.b.sub(value, self.b.srem(value, word(step)))

    def least(self, x: Value, y: Value) -> Value:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def splat(self, value: Value, lanes: int) -> Value:
        """Returns a vector of `lanes` copies."""
        empty = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.b.insert_element(empty, value, ir.Constant(INT32, 0))
        return self.lanes(first, [0] * lanes)

    def lanes(self, value: Value, which: Sequence[int]) -> Value:
        """Returns the lanes `which` of a vector."""
        mask = ir.Constant(ir.VectorType(INT32, len(which)), list(which))
        return self.b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

    def constant(self, value: float, lanes: int) -> ir.Constant:
        """Returns a vector of `lanes` float32 numbers that are the same."""
        return ir.Constant(ir.VectorType(FLOAT, lanes), [value] * lanes)

    def looked_up(self, table: Value, codes: Value) -> Value:
        """Returns the numbers of a vector of 16 at the lowest 4 bits of each code (AVX-512)."""
        kind = table.type
        look = self._intrinsic("x86.avx512.permvar.sf.512", kind, [kind, codes.type])
        return self.b.call(look, [table, codes])

    def looked_up_bytes(self, table: Sequence[int], codes: Value) -> Value:
        """Returns the bytes of a table of 16 at 16, 32 or 64 codes below 16 (AVX-512)."""
        kind, count = codes.type, codes.type.count
        name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[count]
        look = self._intrinsic(f"x86.{name}", kind, [kind, kind])
        return self.b.call(look, [ir.Constant(kind, [*table] * (count // 16)), codes])

    def affine(self, codes: Value, rows: Sequence[int], added: int) -> Value:
        """Returns bytes whose bits are sums of bits of the given ones (GFNI).

        Bit i is the parity of the byte's bits that rows[7 - i] has, plus bit i of `added`.
        """
        kind, count = codes.type, codes.type.count
        name = f"x86.vgf2p8affineqb.{8 * count}"
        function = self._intrinsic(name, kind, [kind, kind, INT8])
        matrix = ir.Constant(kind, [*rows] * (count // 8))
        return self.b.call(function, [codes, matrix, ir.Constant(INT8, added)])

    def rounded(self, numbers: Value) -> Value:
        """Returns the nearest whole numbers of a vector."""
        kind = numbers.type
        return self.b.call(self._intrinsic(f"rint.v{kind.count}f32", kind, [kind]), [numbers])

    def root(self, number: Value) -> Value:
        """Returns the square root of a float32 number."""
        return self.b.call(self._intrinsic("sqrt.f32", FLOAT, [FLOAT]), [number])

    def amx(self, name: str, *arguments: Value | int) -> None:
        """Calls an instruction of AMX; whole numbers are tiles."""
        given = [ir.Constant(INT8, each) if isinstance(each, int) else each for each in arguments]
        kinds = [each.type for each in given]
        self.b.call(self._intrinsic(f"x86.{name}", ir.VoidType(), kinds), given)

    def add_products(self, x: Value, y: Value, total: Value) -> Value:
        """Adds to each lane the products of its four bytes (VNNI).

        Args:
          x, y: vectors of bytes, without and with a sign.
          total: a vector of words.
        """
        kind = total.type
        name = f"x86.avx512.vpdpbusd.{32 * kind.count}"
        given = [self.b.bitcast(x, kind), self.b.bitcast(y, kind)]
        return self.b.call(self._intrinsic(name, kind, [kind] * 3), [total, *given])

    def products(self, pairs: Sequence[tuple[Value, Value]]) -> Value:
        """Returns in each lane the products of its four bytes, summed over the pairs (AVX2).

        Pairs are as x and y of `add_products`.  Sums of two bytes over the pairs are below 2^15.
        """
        b = self.b
        byte = pairs[0][0].type
        half, word = (
            ir.VectorType(kind, byte.count // by) for kind, by in ((INT16, 2), (INT32, 4))
        )
        two = self._intrinsic("x86.avx2.pmadd.ub.sw", half, [byte, byte])
        total = b.call(two, list(pairs[0]))
        for pair in pairs[1:]:
            total = b.add(total, b.call(two, list(pair)))
        neighbours = self._intrinsic("x86.avx2.pmadd.wd", word, [half, half])
        return b.call(neighbours, [total, ir.Constant(half, [1] * half.count)])

    def magnitude(self, vectors: Sequence[Value]) -> Value:
        """Returns the largest absolute value in vectors of float32 numbers; at least 1e-30.

        It is NaN if one of the numbers is.
        """
        b, words = self.b, ir.VectorType(INT32, vectors[0].type.count)
        mask = ir.Constant(words, [0x7FFFFFFF] * words.count)
        # The bits of numbers without a sign are in the order of the numbers, and NaNs come last.
        sizes = [b.and_(b.bitcast(vector, words), mask) for vector in vectors]

        def larger(x: Value, y: Value) -> Value:
            return b.select(b.icmp_unsigned(">", x, y), x, y)

        most = self.largest(functools.reduce(larger, sizes))
        words = self.b.bitcast(most, INT32)
        return b.bitcast(larger(words, ir.Constant(INT32, _LEAST)), FLOAT)

    def largest(self, sizes: Value) -> Value:
        """Returns the largest of float32 numbers without a sign, given by a vector of bits."""
        b = self.b
        while (count := sizes.type.count) > 1:
            half = count // 2
            low, high = self.lanes(sizes, range(half)), self.lanes(sizes, range(half, count))
            sizes = b.select(b.icmp_unsigned(">", low, high), low, high)
        return b.bitcast(b.extract_element(sizes, ir.Constant(INT32, 0)), FLOAT)

    def largest_size(self, x: Value, count: Value, lanes: int) -> Value:
        """Returns the largest absolute value of float32 numbers at an address.

        `lanes` divides their count.
        """
        b, real, whole = self.b, ir.VectorType(FLOAT, lanes), ir.VectorType(INT32, lanes)
        mask = ir.Constant(whole, [0x7FFFFFFF] * lanes)
        with self.loop(word(0), count, lanes, [zeros(whole)]) as (i, now, following):
            # Numbers without a sign are ordered as their bits are.
            size = b.and_(b.bitcast(self.read(x, i, real, 4), whole), mask)
            following[0] = b.select(b.icmp_unsigned(">", size, now[0]), size, now[0])
        return self.largest(now[0])

    def read_some(self, base: Value, index: Value, lanes: int, count: Value, align: int) -> Value:
        """Reads the first `count` numbers of a vector at base[index], with zeros after them."""
        kind = ir.VectorType(base.type.pointee, lanes)
        place = self.b.bitcast(self.b.gep(base, [index]), kind.as_pointer())
        many = self._first(lanes, count)
        given = [place, ir.Constant(INT32, align), many, zeros(kind)]
        name = f"masked.load.v{lanes}{_suffix(kind.element)}.p0"
        return self.b.call(self._intrinsic(name, kind, [each.type for each in given]), given)

    def write_some(self, value: Value, base: Value, index: Value, count: Value, align: int) -> None:
        """Writes the first `count` numbers of a vector."""
        place = self.b.bitcast(self.b.gep(base, [index]), value.type.as_pointer())
        many = self._first(value.type.count, count)
        given = [value, place, ir.Constant(INT32, align), many]
        name = f"masked.store.v{value.type.count}{_suffix(value.type.element)}.p0"
        self.b.call(self._intrinsic(name, ir.VoidType(), [each.type for each in given]), given)

    def _first(self, lanes: int, count: Value) -> Value:
        numbers = ir.Constant(ir.VectorType(WORD, lanes), list(range(lanes)))
        return self.b.icmp_signed("<", numbers, self.splat(count, lanes))

    def read_bytes(self, base: Value, at: Value, size: int, lanes: int) -> Value:
        """Reads `size` bytes into a vector of `lanes`, with zeros after them."""
        return self.padded(self.read(base, at, ir.VectorType(INT8, size), 1), lanes)

    def padded(self, value: Value, lanes: int) -> Value:
        """Returns a vector of `lanes` that has zeros after the lanes of a shorter one."""
        if (size := value.type.count) == lanes:
            return value
        mask = ir.Constant(ir.VectorType(INT32, lanes), [min(j, size) for j in range(lanes)])
        return self.b.shuffle_vector(value, zeros(value.type), mask)

    def joined(self, vectors: Sequence[Value]) -> Value:
        """Returns the lanes of some vectors, a power of two of them, in one."""
        made = list(vectors)
        while len(made) > 1:
            both = list(range(2 * made[0].type.count))
            mask = ir.Constant(ir.VectorType(INT32, len(both)), both)
            made = [
                self.b.shuffle_vector(x, y, mask)
                for x, y in zip(made[0::2], made[1::2], strict=True)
            ]
        return made[0]

    def larger(self, x: Value, y: Value) -> Value:
        """Returns the larger one, lane by lane; y where x is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def add(self, x: Value, y: Value) -> Value:
        of = x.type.element if isinstance(x.type, ir.VectorType) else x.type
        return self.b.fadd(x, y) if of == FLOAT else self.b.add(x, y)

    def sum(self, value: Value) -> Value:
        """Returns the sum of a vector's lanes: halves are added until one lane is left."""
        while (count := value.type.count) > 1:
            half = count // 2
            value = self.add(self.lanes(value, range(half)), self.lanes(value, range(half, count)))
        return self.b.extract_element(value, ir.Constant(INT32, 0))

    def sums(self, values: Sequence[Value]) -> Value:
        """Returns a vector in which the lanes of each of these vectors are added.

        A power of two of vectors makes one; of as many as each has lanes, it has their sums.
        """
        while len(values) > 1:
            lanes = values[0].type.count
            halves = [
                ir.Constant(ir.VectorType(INT32, lanes), list(range(first, 2 * lanes, 2)))
                for first in (0, 1)
            ]
            values = [
                self.add(*(self.b.shuffle_vector(x, y, half) for half in halves))
                for x, y in zip(values[::2], values[1::2], strict=True)
            ]
        return values[0]

    def each_sum(self, vectors: Sequence[Value]) -> list[Value]:
        """Returns the sum of each vector's lanes, whose order is the same for any number of them.

        Neighbours are added until one lane is left.
        """
        found: list[Value] = []
        at_once = vectors[0].type.count
        for first in range(0, len(vectors), at_once):
            mine = vectors[first : first + at_once]
            total = self.packed_sums(mine)
            found += [
                self.b.extract_element(total, ir.Constant(INT32, j)) for j in range(len(mine))
            ]
        return found

    def packed_sums(self, vectors: Sequence[Value]) -> Value:
        """Returns the sums of `each_sum` in a vector, which begins with that of the first one.

        There are at most as many vectors as each has lanes.
        """
        mine = list(vectors)
        while len(mine) & (len(mine) - 1):
            mine.append(mine[-1])
        total = self.sums(mine)
        while total.type.count > len(mine):
            even, odd = (self.lanes(total, range(i, total.type.count, 2)) for i in (0, 1))
            total = self.add(even, odd)
        return total

    def turned(self, vectors: Sequence[Value]) -> list[Value]:
        """Returns n vectors of n numbers; number j of vector i is number i of the given one j."""
        made, count = list(vectors), len(vectors)  # a power of two
        kind, steps = ir.VectorType(INT32, count), [2**i for i in range(count.bit_length() - 1)]
        for step in reversed(steps):
            masks = [
                ir.Constant(
                    kind, [(k & ~step | (count if k & step else 0)) + high for k in range(count)]
                )
                for high in (0, step)
            ]
            for i in range(count):
                if not i & step:
                    pair = made[i], made[i + step]
                    made[i], made[i + step] = (self.b.shuffle_vector(*pair, mask) for mask in masks)
        return made

    def widened(self, value: Value) -> Value:
        """Returns bfloat16 numbers, given as their bits, in float32: one, or a vector of them."""
        of = value.type
        many = isinstance(of, ir.VectorType)
        high, real = (ir.VectorType(t, of.count) if many else t for t in (INT32, FLOAT))
        shift = ir.Constant(high, [16] * of.count if many else 16)
        return self.b.bitcast(self.b.shl(self.b.zext(value, high), shift), real)

    def narrowed(self, value: Value) -> Value:
        """Returns the bits of float32 numbers rounded to bfloat16, to even: one, or a vector."""
        of = value.type
        many = isinstance(of, ir.VectorType)
        high, low = (ir.VectorType(t, of.count) if many else t for t in (INT32, INT16))

        def every(number: int) -> ir.Constant:
            return ir.Constant(high, [number] * of.count if many else number)

        bits = self.b.bitcast(value, high)
        even = self.b.and_(self.b.lshr(bits, every(16)), every(1))
        bits = self.b.add(bits, self.b.add(even, every(0x7FFF)))
        return self.b.trunc(self.b.lshr(bits, every(16)), low)

    def multiply_add(self, x: Value, y: Value, z: Value) -> Value:
        """Returns x * y + z in float32, rounded once where the processor can."""
        kind = x.type
        shape = "f32" if kind == FLOAT else f"v{kind.count}f32"
        return self.b.call(self._intrinsic(f"fmuladd.{shape}", kind, [kind] * 3), [x, y, z])

    def prefetch(self, place: Value, level: int = 2) -> None:
        """Prefetches the cache line of an address, which need not exist, into a cache of 1 to 3.

        Few lines can be on their way to L1, so that memory is read faster into L2: on two cores of
        a Zen 4 at up to twice the speed.
        """
        byte = INT8.as_pointer()
        fetch = self._intrinsic("prefetch.p0", ir.VoidType(), [byte, INT32, INT32, INT32])
        how = [ir.Constant(INT32, value) for value in (0, 4 - level, 1)]  # to read, level, data
        self.b.call(fetch, [self.b.bitcast(place, byte), *how])

    def c(self, name: str) -> ir.Function:
        """Returns a function of C's library."""
        byte = INT8.as_pointer()
        kind = {
            "malloc": ir.FunctionType(byte, [WORD]),
            "free": ir.FunctionType(ir.VoidType(), [byte]),
            "sched_yield": ir.FunctionType(INT32, []),
        }[name]
        module = self.b.module
        return module.globals.get(name) or ir.Function(module, kind, name)

    def memory(self, *sizes: Value) -> tuple[Value, list[Value]]:
        """Takes memory: returns what is to be freed, and pieces of so many bytes."""
        taken = self.b.call(self.c("malloc"), [self.room(*sizes)])
        return taken, self.places(taken, *sizes)

    def room(self, *sizes: Value) -> Value:
        """Returns the bytes of memory that has pieces of so many bytes."""
        b, end = self.b, word(64)
        for size in sizes:
            end = b.add(end, self.whole(b.add(size, word(63)), 64))
        return end

    def places(self, memory: Value, *sizes: Value) -> list[Value]:
        """Returns where pieces of so many bytes lie in memory; each begins at a multiple of 64."""
        b, found = self.b, []
        at = b.add(self.whole(b.ptrtoint(memory, WORD), 64), word(64))
        for size in sizes:
            found.append(b.inttoptr(at, INT8.as_pointer()))
            at = b.add(at, self.whole(b.add(size, word(63)), 64))
        return found

    def _intrinsic(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        module = self.b.module
        found = module.globals.get(f"llvm.{name}")
        return found or ir.Function(module, ir.FunctionType(result, arguments), f"llvm.{name}")
