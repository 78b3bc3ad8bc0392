"""The exponential and the hyperbolic tangent of vectors of float32, without C's library."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llvmlite import ir

from specjax.kernels.emitting import INT32, Emitter, Value

_LEAST = -87.33
"""The least argument for which the exponential is still a normal number."""

_LOG2 = (0.693359375, -2.12194440e-4)
"""ln 2 as a sum, of which the first number has so few bits that multiples of it are exact."""

_EXP = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
    4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
"""(e^r - 1 - r) / r^2 for |r| <= ln(2) / 2, from r^5 down (Cephes, `expf`)."""

_ROUND = 1.5 * 2**23
"""A float32 number of this size has no fraction, and its last bits are an integer."""

_TANH = (
    -2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-8,
    1.48572235717979e-5, 6.37261928875436e-4, 4.89352455891786e-3,
)  # fmt: skip
_OVER = (1.19825839466702e-6, 1.18534705686654e-4, 2.26843463243900e-3, 4.89352518554385e-3)
"""tanh(x) = x P(x^2) / Q(x^2) for |x| <= _FLAT (Eigen, which XLA uses too)."""

_FLAT = 7.90531110763549805
"""The least argument for which the hyperbolic tangent is 1 in float32."""


def exponential(emit: Emitter, x: Value) -> Value:
    """Computes e^x for x <= 0, at least e^-87.33; NaN stays NaN."""
    b, lanes = emit.b, x.type.count

    def every(value: float) -> ir.Constant:
        return emit.constant(value, lanes)

    x = b.select(b.fcmp_ordered("<", x, every(_LEAST)), every(_LEAST), x)
    shifted = emit.multiply_add(x, every(math.log2(math.e)), every(_ROUND))
    power = b.fsub(shifted, every(_ROUND))
    rest = emit.multiply_add(power, every(-_LOG2[0]), x)
    rest = emit.multiply_add(power, every(-_LOG2[1]), rest)
    tail = _polynomial(emit, rest, _EXP)
    near_one = emit.multiply_add(b.fmul(rest, rest), tail, b.fadd(rest, every(1.0)))
    whole = ir.VectorType(INT32, lanes)
    exponent = b.shl(b.bitcast(shifted, whole), ir.Constant(whole, [23] * lanes))
    return b.bitcast(b.add(b.bitcast(near_one, whole), exponent), x.type)


def tangent(emit: Emitter, x: Value) -> Value:
    """Computes tanh(x); NaN stays NaN."""
    b, lanes = emit.b, x.type.count
    for limit, beyond in ((-_FLAT, "<"), (_FLAT, ">")):
        bound = emit.constant(limit, lanes)
        x = b.select(b.fcmp_ordered(beyond, x, bound), bound, x)
    square = b.fmul(x, x)
    over = _polynomial(emit, square, _OVER)
    return b.fdiv(b.fmul(x, _polynomial(emit, square, _TANH)), over)


def _polynomial(emit: Emitter, x: Value, factors: Sequence[float]) -> Value:
    """Evaluates a polynomial; the first factor is that of the highest power."""
    total = emit.constant(factors[0], x.type.count)
    for factor in factors[1:]:
        total = emit.multiply_add(total, x, emit.constant(factor, x.type.count))
    return total
