"""The order in which a product reads the rows of a matrix.

The rows are divided into as many runs as there are streams (`Machine.streams`).  One row of each
run is read, then the next row of each, and the rows that are left over come last.  Of a matrix
[in, out] the terms of a sum are added in this order.  Every loop keeps it, so that a token has the
same bits in passes over few tokens and over many.
"""

from __future__ import annotations

from specjax.kernels.emitting import Emitter, Value, word

AHEAD = 256
"""The bytes after which a prefetched line of a stream is read, if there are several."""


def row_at(emit: Emitter, streams: int, depth: Value, turn: Value) -> Value:
    """Returns the row that is added in this turn, a number in [0, depth)."""
    if streams == 1:
        return turn
    b = emit.b
    run = b.sdiv(depth, word(streams))
    of_a_run = b.add(b.mul(b.srem(turn, word(streams)), run), b.sdiv(turn, word(streams)))
    return b.select(b.icmp_signed("<", turn, b.mul(run, word(streams))), of_a_run, turn)


def apart(
    emit: Emitter, streams: int, first: Value, last: Value, i: Value, count: int
) -> list[Value]:
    """Returns `count` of the rows [first, last) of a matrix [out, in], which are read at once.

    Args:
      emit: writes the instructions.
      streams: with a single one the rows are neighbours, else each begins a run.
      first, last: the rows of a part.
      i: as `Emitter.tiles` passes it.
      count: the number of rows.
    """
    b = emit.b
    if streams == 1 or count == 1:
        return [b.add(i, word(j)) for j in range(count)]
    run = b.sdiv(b.sub(last, first), word(count))
    begin = b.add(first, b.sdiv(b.sub(i, first), word(count)))
    return [b.add(begin, b.mul(run, word(j))) for j in range(count)]
