"""Writes the keys or values of new tokens into the pages or the slots of their rows, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llvmlite import ir

from specjax.kernels.emitting import INT16, INT32, WORD, Emitter, Value, word
from specjax.kernels.sharing import part_of

KINDS = {"float32": (INT32, 4), "bfloat16": (INT16, 2), "float16": (INT16, 2)}
"""The type as which numbers of a dtype are copied, and its bytes."""


class _RowByRow:
    """The same for pages and slots: a part is one row, and the sizes begin with B, K, N, dim."""

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        batch, heads, width, dim, _ = sizes
        return emit.b.mul(emit.b.mul(batch, heads), emit.b.mul(width, dim))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return sizes[0]


@dataclasses.dataclass(frozen=True)
class Writing(_RowByRow):
    """The `sharing.Work` of writing; a part is one row of the batch.

    Its buffers are the new tokens [B, K, N, dim], the table [B, T] with the numbers of each row's
    pages, the first slot [B] of the new tokens, the pages [P, K, page, dim], and the result, which
    is in their memory.  A token whose page has the number 0, or that lies behind the table, is not
    written.
    """

    dtype: str
    page: int

    buffers = 5
    sizes = ((0, 0), (0, 1), (0, 2), (0, 3), (1, 1))  # B, K, N, dim, T

    @property
    def name(self) -> str:
        return f"writing_{self.dtype}_{self.page}"

    def function(self, module: ir.Module) -> ir.Function:
        kind, size = KINDS[self.dtype]
        function = part_of(module, self.name, (kind, INT32, INT32, kind, kind), 7)
        emit = Emitter(function)
        b = emit.b
        new, table, start, _, pages, row, _, _, heads, width, dim, most = function.args
        first = b.sext(emit.read(start, row, INT32, 4), WORD)
        with emit.loop(word(0), width, 1) as (token, _, _):
            slot = b.add(first, token)
            index = b.sdiv(slot, word(self.page))
            with b.if_then(b.icmp_signed("<", index, most)):
                at = b.add(b.mul(row, most), index)
                number = b.sext(emit.read(table, at, INT32, 4), WORD)
                with (
                    b.if_then(b.icmp_signed(">", number, word(0))),
                    emit.loop(word(0), heads, 1) as (head, _, _),
                ):
                    pair = b.add(b.mul(row, heads), head)
                    source = b.mul(b.add(b.mul(pair, width), token), dim)
                    pair = b.add(b.mul(number, heads), head)
                    within = b.srem(slot, word(self.page))
                    target = b.mul(b.add(b.mul(pair, word(self.page)), within), dim)
                    _copy(emit, size, dim, (new, source), (pages, target))
        b.ret_void()
        return function


@dataclasses.dataclass(frozen=True)
class SlotsWriting(_RowByRow):
    """The same for the slots of a cache: a part is one row of the batch.

    Its buffers are the new tokens [B, K, N, dim], the first slot [B] of them, the slots
    [B, K, S, dim], and the result, which is in their memory.  Tokens behind the slots are dropped.
    """

    dtype: str

    buffers = 4
    sizes = ((0, 0), (0, 1), (0, 2), (0, 3), (2, 2))  # B, K, N, dim, S

    @property
    def name(self) -> str:
        return f"writing_slots_{self.dtype}"

    def function(self, module: ir.Module) -> ir.Function:
        kind, size = KINDS[self.dtype]
        function = part_of(module, self.name, (kind, INT32, kind, kind), 7)
        emit = Emitter(function)
        b = emit.b
        new, start, _, cache, row, _, _, heads, width, dim, slots = function.args
        first = b.sext(emit.read(start, row, INT32, 4), WORD)
        room = b.sub(slots, first)
        some = emit.least(width, room)
        with emit.loop(word(0), heads, 1) as (head, _, _):
            pair = b.add(b.mul(row, heads), head)
            with emit.loop(word(0), some, 1) as (token, _, _):
                source = b.mul(b.add(b.mul(pair, width), token), dim)
                slot = b.add(b.mul(pair, slots), b.add(first, token))
                _copy(emit, size, dim, (new, source), (cache, b.mul(slot, dim)))
        b.ret_void()
        return function


def _copy(
    emit: Emitter, size: int, dim: Value, of: tuple[Value, Value], to: tuple[Value, Value]
) -> None:
    """Copies `dim` numbers of `size` bytes; both places are an array and an index."""
    kind = of[0].type.pointee
    with emit.loop(word(0), dim, 1) as (i, _, _):
        value = emit.read(of[0], emit.b.add(of[1], i), kind, size)
        emit.write(value, to[0], emit.b.add(to[1], i), size)
