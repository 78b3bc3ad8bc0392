"""The order in which a product adds the rows of a matrix [in, out].

With several streams the rows are as many runs of neighbours, and the next row of each run is added
in turn; the rows that are left come last.  Every loop keeps this order, so that a token has the
same bits in passes over few tokens and over many.
"""

from __future__ import annotations

from specjax.kernels.emitting import Emitter, Value, word


def row_at(emit: Emitter, streams: int, depth: Value, turn: Value) -> Value:
    """Returns the row that is added in this turn, a number in [0, depth)."""
    if streams == 1:
        return turn
    b = emit.b
    run = b.sdiv(depth, word(streams))
    of_a_run = b.add(b.mul(b.srem(turn, word(streams)), run), b.sdiv(turn, word(streams)))
    return b.select(b.icmp_signed("<", turn, b.mul(run, word(streams))), of_a_run, turn)
