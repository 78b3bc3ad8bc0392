"""Loops that draw a token of each row of logits, and add up the row's exponentials.

The token is argmax(t + g) for the warped logits t and Gumbel noise g = -log(-log u).  It is also
the argmin of E / p for E = -log u and p = exp(t - max t), and E is at least 1 - u.  So a logarithm
is only taken where 1 - u is at most p times the least E / p so far: some ten times a row.  The
noise of all other tokens does not matter (bounds as in A* sampling: Maddison, Tarlow and Minka
2014, arXiv 1411.0030).

XLA adds noise in float32, which differs by some units in the last place.  A row is not sure if its
two best tokens are so near to each other that this could decide, and the caller draws it as XLA
does.  So every token is that of XLA, although no logarithm here has XLA's bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT32, WORD, Emitter, Value, word, zeros
from specjax.kernels.functions import exponential
from specjax.kernels.sharing import part_of
from specjax.kernels.threefry import bits_from, folded_key

NEAR, NEAR_EACH = 5e-5, 2.0**-20
"""A row is not sure if t + g of two tokens differ by less than the sum of the first number and of
the second one times the size of the greatest t: eight units in its last place.
"""

_TOGETHER = 2
"""Vectors whose random bits are made at once, as each instruction waits for the one before."""

_STEPS = 2**23
"""JAX's u is a multiple of one over this number."""

_MOST = -math.log(2.0**-126)
"""The greatest E: for 0, JAX takes the least normal number of float32."""

_TERMS = 8
"""Terms of the series of a logarithm, for a relative error of 1e-13."""

_AS_PRODUCTS = 4
"""The multiplications of the kernel for products that take as long as one number."""

_BIT, _DOUBLE = ir.IntType(1), ir.DoubleType()


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The `sharing.Work` of draws; a part is one row.

    Its buffers are logits [N, V] float32, keys [N, 2] and what is folded into them [N, 1] as for
    `RandomBits`, settings [N, 3] float32, and the result [N, 5] float32.

    The settings of a row are its temperature (0: the greatest logit is drawn), the least logit that
    is kept, and whether sums are wanted at temperature 0.  The result has the bits of two integers,
    the token and whether it is sure, and three numbers: the greatest logit, and the sums of
    exp(logit - greatest) and of exp((logit - greatest) / temperature), this one over what is kept.
    """

    lanes: int

    name = "drawing"
    buffers = 5
    sizes = ((0, 0), (0, 1))  # N, V

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        return emit.b.mul(emit.b.mul(*sizes), word(_AS_PRODUCTS))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return sizes[0]

    def function(self, module: ir.Module) -> ir.Function:
        function = part_of(module, self.name, (FLOAT, INT32, INT32, FLOAT, FLOAT), 4)
        _Row(self, function).write()
        return function


class _Row:
    """Writes the instructions for one row."""

    def __init__(self, work: Drawing, function: ir.Function) -> None:
        self.lanes, self.emit = work.lanes, Emitter(function)
        self.b: Any = self.emit.b
        b, emit = self.b, self.emit
        self.vector = ir.VectorType(FLOAT, self.lanes)
        self.words = ir.VectorType(INT32, self.lanes)
        logits, keys, folded, settings, out, row, _, _, self.size = function.args
        self.logits = b.gep(logits, [b.mul(row, self.size)])
        self.out = b.gep(out, [b.mul(row, word(5))])
        self.key = folded_key(emit, keys, folded, row)
        at = b.mul(row, word(3))
        self.temperature, self.least, self.sums = (
            emit.read(settings, b.add(at, word(i)), FLOAT, 4) for i in range(3)
        )
        self.last, self.weights, self.distances = (b.alloca(self.vector) for _ in range(3))
        self.best, self.second, self.slack = (b.alloca(_DOUBLE) for _ in range(3))
        self.sum, self.raw_sum, self.bound = (b.alloca(FLOAT) for _ in range(3))
        self.token, self.sure = b.alloca(INT32), b.alloca(_BIT)

    def write(self) -> None:
        b, emit = self.b, self.emit
        one, infinite = ir.Constant(FLOAT, 1.0), ir.Constant(FLOAT, math.inf)
        greatest, sound = self._greatest()
        sound = b.and_(sound, b.fcmp_ordered("<", self._size(greatest), infinite))
        b.store(one, self.sum)
        b.store(one, self.raw_sum)
        greedy = b.fcmp_ordered("==", self.temperature, zeros(FLOAT))
        with b.if_else(greedy) as (then, otherwise):
            with then:
                b.store(self._first(greatest), self.token)
                b.store(sound, self.sure)
                with b.if_then(b.fcmp_ordered("!=", self.sums, zeros(FLOAT))):
                    b.store(self._sum(greatest), self.raw_sum)
            with otherwise:
                b.store(b.and_(sound, self._draw(greatest)), self.sure)
                plain = b.fcmp_ordered("==", self.temperature, one)
                every = b.fcmp_ordered("==", self.least, ir.Constant(FLOAT, -math.inf))
                with b.if_else(b.and_(plain, every)) as (same, differs):
                    with same:
                        b.store(b.load(self.sum), self.raw_sum)
                    with differs:
                        b.store(self._sum(greatest), self.raw_sum)
        integers = b.load(self.token), b.zext(b.load(self.sure), INT32)
        numbers = greatest, b.load(self.raw_sum), b.load(self.sum)
        for i, value in enumerate([*(b.bitcast(x, FLOAT) for x in integers), *numbers]):
            emit.write(value, self.out, word(i), 4)
        b.ret_void()

    def _over(
        self,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value], list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Runs `body(index, vectors, carried)` over the logits; the last vector is filled by -inf.

        A vector begins `lanes` after the one before, the first one at `index`.
        """
        b, emit, begin = self.b, self.emit, word(0)
        for count in (_TOGETHER, 1, 0):
            step = max(count, 1) * self.lanes
            stop = b.add(begin, emit.whole(b.sub(self.size, begin), step)) if count else self.size
            with emit.loop(begin, stop, step, carried) as (v, now, following):
                vectors = [
                    emit.read(self.logits, b.add(v, word(i * self.lanes)), self.vector, 4)
                    for i in range(count)
                ]
                following[:] = body(v, vectors or [self._last(v)], now)
            carried, begin = now, stop
        return list(carried)

    def _last(self, begin: Value) -> Value:
        b, emit = self.b, self.emit
        b.store(emit.constant(-math.inf, self.lanes), self.last)
        place = b.bitcast(self.last, FLOAT.as_pointer())
        with emit.loop(begin, self.size, 1) as (v, _, _):
            emit.write(emit.read(self.logits, v, FLOAT, 4), place, b.sub(v, begin), 4)
        return b.load(self.last)

    def _greatest(self) -> tuple[Value, Value]:
        """Returns the greatest logit, and whether none is NaN."""
        b, emit = self.b, self.emit

        def body(_: Value, vectors: list[Value], now: list[Value]) -> list[Value]:
            most, wrong = now
            for x in vectors:
                most, wrong = emit.larger(x, most), b.or_(wrong, b.fcmp_unordered("uno", x, x))
            return [most, wrong]

        none = zeros(ir.VectorType(_BIT, self.lanes))
        most, wrong = self._over([emit.constant(-math.inf, self.lanes), none], body)
        greatest = self._folded(most, emit.larger)
        return greatest, b.not_(self._any(wrong))

    def _first(self, greatest: Value) -> Value:
        """Returns the index of the first logit that is the greatest one."""
        b, emit = self.b, self.emit

        def less(x: Value, y: Value) -> Value:
            return b.select(b.icmp_signed("<", x, y), x, y)

        def body(index: Value, vectors: list[Value], now: list[Value]) -> list[Value]:
            (least,) = now
            for i, x in enumerate(vectors):
                at = b.trunc(b.add(index, word(i * self.lanes)), INT32)
                steps = ir.Constant(self.words, list(range(self.lanes)))
                at = b.add(emit.splat(at, self.lanes), steps)
                here = b.fcmp_ordered("==", x, emit.splat(greatest, self.lanes))
                least = less(b.select(here, at, none), least)
            return [least]

        none = ir.Constant(self.words, [0x7FFFFFFF] * self.lanes)
        return self._folded(self._over([none], body)[0], less)

    def _sum(self, greatest: Value) -> Value:
        """Returns the sum of exp(logit - greatest)."""

        def body(_: Value, vectors: list[Value], now: list[Value]) -> list[Value]:
            return [
                self.b.fadd(total, exponential(self.emit, self.b.fsub(x, most)))
                for total, x in zip(now, vectors, strict=False)
            ] + now[len(vectors) :]

        most = self.emit.splat(greatest, self.lanes)
        return self._total(self._over([zeros(self.vector)] * _TOGETHER, body))

    def _draw(self, greatest: Value) -> Value:
        """Draws a token, and adds up exp(t - max t); returns whether it is sure."""
        b, emit = self.b, self.emit
        factor = b.fdiv(ir.Constant(FLOAT, 1.0), self.temperature)
        each = b.fmul(self._size(b.fmul(greatest, factor)), ir.Constant(FLOAT, NEAR_EACH))
        near = b.fpext(b.fadd(each, ir.Constant(FLOAT, NEAR)), _DOUBLE)
        # 1 + 2 x is more than e^x for x up to 1.
        near = b.fadd(near, near)
        b.store(b.fadd(near, ir.Constant(_DOUBLE, 1.0)), self.slack)
        b.store(ir.Constant(INT32, 0), self.token)
        b.store(ir.Constant(_DOUBLE, math.inf), self.second)
        b.store(ir.Constant(_DOUBLE, _MOST), self.best)  # no worse than that of the greatest t
        self._lower_bound()
        b.store(ir.Constant(_DOUBLE, math.inf), self.best)
        factor, least, most = (emit.splat(x, self.lanes) for x in (factor, self.least, greatest))
        hidden = emit.constant(-math.inf, self.lanes)

        def body(index: Value, vectors: list[Value], now: list[Value]) -> list[Value]:
            sums, bound = list(now), emit.splat(b.load(self.bound), self.lanes)
            found: list[tuple[Value, Value, Value]] = []
            for i, x in enumerate(vectors):
                below = b.select(b.fcmp_ordered("<", x, least), hidden, b.fsub(x, most))
                weight = exponential(emit, b.fmul(below, factor))
                sums[i] = b.fadd(sums[i], weight)
                at = b.add(index, word(i * self.lanes))
                bits = bits_from(emit, self.key, at, self.lanes)
                steps = b.lshr(bits, ir.Constant(self.words, [9] * self.lanes))
                left = b.sub(ir.Constant(self.words, [_STEPS] * self.lanes), steps)
                found.append((at, b.sitofp(left, self.vector), weight))
            hits = [b.fcmp_ordered("<=", left, b.fmul(bound, p)) for _, left, p in found]
            hit = hits[0]
            for other in hits[1:]:
                hit = b.or_(hit, other)
            with b.if_then(self._any(hit), likely=False):
                for at, left, weight in found:
                    self._look(at, left, weight)
            return sums

        b.store(self._total(self._over([zeros(self.vector)] * _TOGETHER, body)), self.sum)
        gap = b.fmul(b.load(self.best), b.load(self.slack))
        clear = b.fcmp_ordered(">", b.load(self.second), gap)
        return b.and_(clear, b.fcmp_ordered("<", near, ir.Constant(_DOUBLE, 1.0)))

    def _look(self, at: Value, left: Value, weight: Value) -> None:
        """Compares E / p of the lanes of a vector that may have the least one so far."""
        b, emit = self.b, self.emit
        b.store(left, self.distances)
        b.store(weight, self.weights)
        distances, weights = (
            b.bitcast(place, FLOAT.as_pointer()) for place in (self.distances, self.weights)
        )
        with emit.loop(word(0), word(self.lanes), 1) as (lane, _, _):
            d, p = (emit.read(place, lane, FLOAT, 4) for place in (distances, weights))
            with b.if_then(b.fcmp_ordered("<=", d, b.fmul(b.load(self.bound), p))):
                number = b.fdiv(self._exponential_of(d), b.fpext(p, _DOUBLE))
                best, second = b.load(self.best), b.load(self.second)
                better = b.fcmp_ordered("<", number, best)
                loser = b.select(better, best, number)
                nearer = b.fcmp_ordered("<", loser, second)
                b.store(b.select(nearer, loser, second), self.second)
                with b.if_then(better):
                    b.store(number, self.best)
                    b.store(b.trunc(b.add(at, lane), INT32), self.token)
                    self._lower_bound()

    def _lower_bound(self) -> None:
        """Sets the bound of (1 - u) / p, above which no token can win, in steps of u."""
        b = self.b
        bound = b.fmul(b.load(self.best), b.load(self.slack))
        bound = b.fmul(bound, ir.Constant(_DOUBLE, float(_STEPS)))
        b.store(b.fptrunc(bound, FLOAT), self.bound)

    def _exponential_of(self, left: Value) -> Value:
        """Returns E = -log(u) in float64, where `left` is 1 - u in steps of u."""
        b = self.b

        def constant(value: float) -> ir.Constant:
            return ir.Constant(_DOUBLE, value)

        steps = b.fsub(constant(float(_STEPS)), b.fpext(left, _DOUBLE))
        bits = b.bitcast(steps, WORD)
        power = b.sub(b.lshr(bits, word(52)), word(1023))
        fraction = b.or_(b.and_(bits, word(2**52 - 1)), word(1023 << 52))
        f = b.bitcast(fraction, _DOUBLE)
        high = b.fcmp_ordered(">", f, constant(math.sqrt(2)))
        f = b.select(high, b.fmul(f, constant(0.5)), f)
        power = b.add(power, b.zext(high, WORD))
        s = b.fdiv(b.fsub(f, constant(1.0)), b.fadd(f, constant(1.0)))
        square, series = b.fmul(s, s), constant(0.0)
        for term in reversed(range(_TERMS)):
            series = b.fadd(b.fmul(series, square), constant(2 / (2 * term + 1)))
        whole = b.sitofp(b.sub(word(_STEPS.bit_length() - 1), power), _DOUBLE)
        found = b.fsub(b.fmul(whole, constant(math.log(2))), b.fmul(s, series))
        none = b.fcmp_ordered("==", steps, constant(0.0))
        return b.select(none, constant(_MOST), found)

    def _total(self, sums: Sequence[Value]) -> Value:
        total = sums[0]
        for other in sums[1:]:
            total = self.b.fadd(total, other)
        return self.emit.sum(total)

    def _folded(self, vector: Value, two: Callable[[Value, Value], Value]) -> Value:
        """Joins halves of a vector until one number is left."""
        emit = self.emit
        while (count := vector.type.count) > 1:
            half = count // 2
            vector = two(emit.lanes(vector, range(half)), emit.lanes(vector, range(half, count)))
        return self.b.extract_element(vector, ir.Constant(INT32, 0))

    def _any(self, bits: Value) -> Value:
        kind = ir.IntType(self.lanes)
        return self.b.icmp_unsigned("!=", self.b.bitcast(bits, kind), ir.Constant(kind, 0))

    def _size(self, x: Value) -> Value:
        b = self.b
        negative = b.fcmp_ordered("<", x, zeros(FLOAT))
        return b.select(negative, b.fneg(x), x)
