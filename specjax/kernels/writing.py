"""Writes the keys or values of new tokens into the pages of their rows, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from llvmlite import ir

from specjax.kernels.emitting import INT16, INT32, WORD, Emitter, Value, word

KINDS = {"float32": (INT32, 4), "bfloat16": (INT16, 2), "float16": (INT16, 2)}
"""The type as which numbers of a dtype are copied, and its bytes."""


@dataclasses.dataclass(frozen=True)
class Writing:
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

    def products(self, emit: Emitter, sizes: Sequence[Value]) -> Value:
        batch, heads, width, dim, _ = sizes
        return emit.b.mul(emit.b.mul(batch, heads), emit.b.mul(width, dim))

    def parts(self, emit: Emitter, sizes: Sequence[Value], threads: Value, worth: Value) -> Value:
        return sizes[0]

    def function(self, module: ir.Module) -> ir.Function:
        kind, size = KINDS[self.dtype]
        places = [kind, INT32, INT32, kind, kind]
        signature = ir.FunctionType(
            ir.VoidType(), [*(place.as_pointer() for place in places), *[WORD] * 7]
        )
        function = ir.Function(module, signature, f"{self.name}_part")
        function.linkage = "internal"
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
                    with emit.loop(word(0), dim, 1) as (i, _, _):
                        value = emit.read(new, b.add(source, i), kind, size)
                        emit.write(value, pages, b.add(target, i), size)
        b.ret_void()
        return function
