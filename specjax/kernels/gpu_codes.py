"""Products of few rows with a packed matrix, as one kernel for an NVIDIA GPU.

XLA:GPU writes the wide numbers of a packed matrix to memory, and reads them there.  This kernel,
written with Pallas for Triton, reads codes and widens them in registers.

A program of the kernel has some columns of the result, and one part of the inputs.  The parts are
returned, and whoever reads them adds them in their order.  The result of a row does not depend on
the other rows: rows are multiplied in tiles of `ROWS`, and a matrix has as many parts for one row
as for many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

MOST_ROWS = 64
"""The most rows of a product; of more, the multiplications take longer than the bytes."""

ROWS = 16  # the fewest rows of a product of tensor cores
_INPUTS = 128, 64, 32, 16  # that are read at once
_COLUMN = 256
"""The bytes of a column of a block, at most: an L4 has no room for more in float32."""

_COLUMNS = 64, 32, 16  # that a program computes
_DTYPES = "bfloat16", "float16", "float32"

_PROGRAMS, _MOST_PARTS, _LEAST = 256, 16, 256
"""Programs that keep an H100's 132 processors busy, the most parts of a matrix, and the fewest
inputs of a part."""

Widen = Callable[[Array, Sequence[Array]], Array]
"""Maps codes [G, S, C] and the arrays [G or 1, C] of their groups to numbers [G, S, C] in float32.

It is traced inside the kernel.
"""


class GpuCodes(NamedTuple):
    """A packed matrix, or a stack [E] of them."""

    codes: Array  # [..., groups, inputs of a group, O], of 4 or 8 bits
    others: Sequence[Array]  # [..., groups or 1, O] each
    widen: Widen

    @classmethod
    def plain(cls, stack: Array) -> GpuCodes:
        """Returns matrices [..., I, O] as they are, in one group."""
        return cls(stack[..., None, :, :], (), lambda codes, others: codes)

    @property
    def group(self) -> int:
        """The number of inputs of a group."""
        return self.codes.shape[-2]

    @property
    def columns(self) -> int:
        return self.codes.shape[-1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays, which say how the matrix is read."""
        return tuple(array.shape for array in (self.codes, *self.others))

    @property
    def width(self) -> int | None:
        """The columns that a program computes; None: there is no such program."""
        return next((width for width in _COLUMNS if self.columns % width == 0), None)

    def block(self, dtype: DTypeLike, bytes_of_column: int = _COLUMN) -> int | None:
        """Returns the inputs of a block: whole groups, or an equal part of one.

        None: there is no such block.

        Args:
          dtype: of the numbers that are multiplied.
          bytes_of_column: the most that a column of the block takes.
        """
        groups, size = self.codes.shape[-3:-1]
        most = bytes_of_column // jnp.dtype(dtype).itemsize
        for block in _INPUTS:
            fits = size % block == 0 or block % size == 0
            if block <= most and groups * size % block == 0 and fits:
                return block
        return None

    def parts(self, dtype: DTypeLike) -> int:
        """Returns the number P of parts in which a matrix is multiplied, each of as many blocks."""
        groups, size, columns = self.codes.shape
        block, width = self.block(dtype), self.width
        assert block is not None and width is not None
        blocks, parts = groups * size // block, 1
        while (
            parts < _MOST_PARTS
            and parts * columns // width < _PROGRAMS
            and blocks % (2 * parts) == 0
            and blocks * block // (2 * parts) >= _LEAST
        ):
            parts *= 2
        return parts

    def flat(self) -> list[Array]:
        """Returns the arrays, with codes [..., inputs, O], which `read_block` reads."""
        *stack, groups, size, columns = self.codes.shape
        return [self.codes.reshape(*stack, groups * size, columns), *self.others]

    def takes(self, rows: int, dtype: DTypeLike) -> bool:
        """Returns whether a kernel multiplies `rows` rows of a dtype with it."""
        there = self.block(dtype) is not None and self.width is not None
        return 0 < rows <= MOST_ROWS and jnp.dtype(dtype).name in _DTYPES and there


def few_rows_of_codes_on_gpu(x: Array, matrix: GpuCodes, interpret: bool = False) -> Array:
    """Multiplies rows with a packed matrix, in a program for one GPU.

    Args:
      x: [M, I], at most `MOST_ROWS` rows.  Codes of further inputs are not used.
      matrix: its numbers are rounded to the dtype of x.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [P, M, O] float32, whose sum over P is the product.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    arrays, width = matrix.flat(), matrix.width
    parts, block = matrix.parts(x.dtype), matrix.block(x.dtype)
    assert width is not None and block is not None

    def cut(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((array.shape[0], width), lambda column, part: (0, column))

    return pl.pallas_call(
        functools.partial(_product, matrix.group, block, parts, matrix.widen),
        out_shape=jax.ShapeDtypeStruct((parts, len(x), matrix.columns), jnp.float32),
        grid=(matrix.columns // width, parts),
        in_specs=[pl.BlockSpec(x.shape, lambda column, part: (0, 0)), *map(cut, arrays)],
        out_specs=pl.BlockSpec((None, len(x), width), lambda column, part: (part, 0, column)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="few_rows_of_codes",
    )(x, *arrays)


def _product(group: int, block: int, parts: int, widen: Widen, x: Any, *references: Any) -> None:
    """Computes one part of some columns.

    Args:
      group: the inputs of a group.
      block: inputs that are multiplied at once.
      parts: of the matrix.
      widen: of the matrix.
      x: a reference to the rows [M, I].
      references: to the arrays of `GpuCodes.flat`, and to the result [M, O] of the part.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *held, out = references
    (rows, inputs), (places, width) = x.shape, held[0].shape
    part, each = pl.program_id(1), places // block // parts
    tiles = [jnp.arange(ROWS) + first for first in range(0, rows, ROWS)]

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        start, made = number * block, []
        numbers = read_block(held, widen, group, start, block).astype(x.dtype)
        place = start + jnp.arange(block)[None]
        for tile, total in zip(tiles, sums, strict=True):
            at = [jnp.broadcast_to(index, (ROWS, block)) for index in (tile[:, None], place)]
            there = (at[0] < rows) & (at[1] < inputs)
            some = triton.load(x.at[tuple(at)], mask=there, other=0.0)
            made.append(total + times(some, numbers))
        return tuple(made)

    zeros = jnp.zeros((ROWS, width), jnp.float32)
    sums = jax.lax.fori_loop(part * each, (part + 1) * each, step, (zeros,) * len(tiles))
    column = jnp.broadcast_to(jnp.arange(width)[None], (ROWS, width))
    for tile, total in zip(tiles, sums, strict=True):
        row = jnp.broadcast_to(tile[:, None], (ROWS, width))
        triton.store(out.at[row, column], total, mask=row < rows)


def read_block(
    held: Sequence[Any], widen: Widen, group: int, start: Array, block: int, *stack: Array
) -> Array:
    """Returns a block [block, C] of numbers, inside a kernel.

    Args:
      held: references to the arrays of `GpuCodes.flat`, of which C columns are there.
      widen: of the matrix.
      group: the inputs of a group.
      start: the first input of the block.
      block: the inputs of the block.
      stack: the number of the matrix in a stack.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    share = min(block, group)  # the inputs of one group

    def of_groups(array: Any) -> Array:
        groups = pl.ds(0, 1) if array.shape[-2] == 1 else pl.ds(start // group, block // share)
        return triton.load(array.at[(*stack, groups, slice(None))])

    codes = triton.load(held[0].at[(*stack, pl.ds(start, block), slice(None))])
    if codes.dtype.name == "uint4":
        codes = codes.astype(jnp.uint8)
    wide = widen(codes.reshape(block // share, share, -1), [*map(of_groups, held[1:])])
    return wide.reshape(block, -1)


def times(x: Array, y: Array) -> Array:
    """Multiplies two matrices; by default those of float32 would be of TensorFloat-32."""
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
