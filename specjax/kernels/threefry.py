"""Random bits of Threefry, the counter-based generator of JAX's keys, in vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llvmlite import ir

from specjax.kernels.emitting import INT32, Emitter, Value, word
from specjax.kernels.sharing import part_of

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_ROUNDS = 5  # each of four rotations
_PARITY = 0x1BD11BDA

_AS_PRODUCTS = 2
"""The multiplications of the kernel for products that take as long as the bits of one number."""


@dataclasses.dataclass(frozen=True)
class RandomBits:
    """The `sharing.Work` of random bits; a part is a range of the numbers of every key.

    Its buffers are the keys [N, 2] uint32, what is folded into them [N, 1] uint32, and the result
    [N, V] uint32.  A folded key is the two words that Threefry-2x32 makes of the counter
    (0, what is folded in), as `jax.random.fold_in` defines it.  Number v of it is the exclusive or
    of the two words of the counter (0, v), as `jax.random.bits` does.

    Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.
    """

    lanes: int

    name = "random_bits"
    buffers = 3
    sizes = ((2, 0), (2, 1))  # N, V

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        return emit.b.mul(emit.b.mul(*sizes), word(_AS_PRODUCTS))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return emit.least(threads, worth)

    def function(self, module: ir.Module) -> ir.Function:
        function = part_of(module, self.name, (INT32,) * 3, 4)
        emit = Emitter(function)
        b = emit.b
        keys, folded, result, part, parts, count, size = function.args
        start, end = (
            b.select(
                b.icmp_signed("==", bound, parts),
                size,
                emit.whole(b.sdiv(b.mul(size, bound), parts), self.lanes),
            )
            for bound in (part, b.add(part, word(1)))
        )
        with emit.loop(word(0), count, 1) as (n, _, _):
            pair = folded_key(emit, keys, folded, n)
            begin = start
            for step in (self.lanes, 1):
                stop = b.add(begin, emit.whole(b.sub(end, begin), step))
                with emit.loop(begin, stop, step) as (v, _, _):
                    bits = bits_from(emit, pair, v, step)
                    emit.write(bits, result, b.add(b.mul(n, size), v), 4)
                begin = stop
        b.ret_void()
        return function


_FIRST = ir.Constant(INT32, 0)


def folded_key(emit: Emitter, keys: Value, folded: Value, n: Value) -> Sequence[Value]:
    """Returns the two words of key n with its number folded in."""
    b = emit.b
    pair = [emit.read(keys, b.add(b.mul(n, word(2)), word(i)), INT32, 4) for i in range(2)]
    number = emit.splat(emit.read(folded, n, INT32, 4), 1)
    return [b.extract_element(each, _FIRST) for each in _words(emit, pair, number)]


def bits_from(emit: Emitter, key: Sequence[Value], first: Value, lanes: int) -> Value:
    """Returns the bits of the numbers [first, first + lanes) of a key."""
    b = emit.b
    steps = ir.Constant(ir.VectorType(INT32, lanes), list(range(lanes)))
    counters = b.add(emit.splat(b.trunc(first, INT32), lanes), steps)
    bits = b.xor(*_words(emit, key, counters))
    return bits if lanes > 1 else b.extract_element(bits, _FIRST)


def _words(emit: Emitter, key: Sequence[Value], counters: Value) -> tuple[Value, Value]:
    """Returns vectors with the two words that Threefry-2x32 makes of each counter (0, c)."""
    b, kind = emit.b, counters.type

    def constant(number: int) -> ir.Constant:
        return ir.Constant(kind, [number] * kind.count)

    def rotated(x: Value, by: int) -> Value:
        return b.or_(b.shl(x, constant(by)), b.lshr(x, constant(32 - by)))

    parity = b.xor(b.xor(*key), ir.Constant(INT32, _PARITY))
    words = [emit.splat(value, kind.count) for value in (*key, parity)]
    left, right = words[0], b.add(counters, words[1])
    for turn in range(_ROUNDS):
        for rotation in _ROTATIONS[turn % 2]:
            left = b.add(left, right)
            right = b.xor(left, rotated(right, rotation))
        left = b.add(left, words[(turn + 1) % 3])
        right = b.add(b.add(right, words[(turn + 2) % 3]), constant(turn + 1))
    return left, right
