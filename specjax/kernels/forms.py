"""The inputs of a product of few rows: processor, layout of the matrix, and addresses."""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from specjax.kernels.emitting import FLOAT, INT8, INT16, INT32, Value


@dataclasses.dataclass(frozen=True)
class Machine:
    """A processor: `lanes` float32 numbers are a vector, and it has `registers` of them.

    It may multiply tiles (AMX): of bfloat16 numbers, and of bytes.
    """

    lanes: int
    registers: int
    bfloat16_tiles: bool = False
    byte_tiles: bool = False

    @property
    def streams(self) -> int:
        """Returns how many runs of neighbouring rows of a matrix are read side by side.

        x86 processors with few vector registers lack AVX-512.  Two AMD cores with AVX2 read runs
        1.3 to 1.5 times as fast as neighbouring rows, or parts of them.
        """
        return 4 if self.registers <= 16 else 1

    @property
    def halves(self) -> int:
        """Returns how many parts of the rows of a matrix [in, out] have sums of their own.

        With two, two threads read a half each, which is one piece of memory.
        """
        return 2 if self.registers <= 16 else 1

    @property
    def name(self) -> str:
        tiles = "_bfloat16" * self.bfloat16_tiles + "_bytes" * self.byte_tiles
        return f"{self.lanes}_{self.registers}{tiles}"


@dataclasses.dataclass(frozen=True)
class Form:
    """The layout and the dtype of a matrix; `row` is the dtype of the activations' elements."""

    name: str
    by_columns: bool  # [in, out], as against [out, in]
    weight: ir.Type
    row: ir.Type
    result: ir.Type
    sizes: tuple[int, int]  # bytes of an element of the weights and of the rows


FORMS = {
    "float32": Form("float32", True, FLOAT, FLOAT, FLOAT, (4, 4)),
    "bfloat16": Form("bfloat16", False, INT16, FLOAT, FLOAT, (2, 4)),
    "int8": Form("int8", False, INT8, INT16, INT32, (1, 2)),
    # It has the layout of float32, so that terms are added in the same order.
    "bfloat16_columns": Form("bfloat16_columns", True, INT16, FLOAT, FLOAT, (2, 4)),
    # For activations in float32: tiles of bfloat16 numbers would round them.
    "bfloat16_exact": Form("bfloat16_exact", False, INT16, FLOAT, FLOAT, (2, 4)),
}
"""The form for each dtype of the weights."""

STACKED = {
    "float32": FORMS["float32"],
    "bfloat16": FORMS["bfloat16_columns"],
}
"""The form of the matrices of a stack, for each dtype of the weights."""


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of y = x[:, :depth] @ w, in a function that computes it."""

    x: Value  # pointer to [rows, inner]
    w: Value  # pointer to [depth, stride] by columns, else [stride, inner]
    y: Value  # pointer to [rows, count]
    rows: Value
    depth: Value  # by columns at most `inner`, else the same
    inner: Value
    stride: Value
    count: Value
