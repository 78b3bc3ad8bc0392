"""Products of few rows with a packed matrix, as one kernel for an NVIDIA GPU.

XLA:GPU writes the wide numbers of a packed matrix to memory, and reads them there.  This kernel,
written with Pallas for Triton, reads codes and widens them in registers.

A program of the kernel has some columns of the result, and one part of the inputs.  The parts are
returned, and whoever reads them adds them in their order.  The result of a row does not depend on
the other rows: rows are multiplied in tiles of `_ROWS`, and a matrix has as many parts for one row
as for many.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST_ROWS = 64
"""The most rows of a product; of more, the multiplications take longer than the bytes."""

_ROWS = 16  # the fewest rows of a product of tensor cores
_INPUTS = (128, 64, 32, 16)  # that are read at once
_COLUMNS = (64, 32, 16)

_PROGRAMS, _MOST_PARTS, _LEAST = 256, 16, 256
"""Programs that keep an H100's 132 processors busy, the most parts of a matrix, and the fewest
inputs of a part."""

Widen = Callable[[Array, Sequence[Array]], Array]
"""Maps codes [G, S, C] and the arrays [G or 1, C] of their groups to numbers [G, S, C] in float32.

It is traced inside the kernel.
"""


def takes_codes_on_gpu(rows: int, codes: Array, dtype: Any) -> bool:
    """Returns whether `few_rows_of_codes_on_gpu` multiplies `rows` rows of a dtype with codes.

    Args:
      codes: [groups, inputs of a group, out].
    """
    groups, size, columns = codes.shape
    return (
        0 < rows <= MOST_ROWS
        and jnp.dtype(dtype).name in ("bfloat16", "float16", "float32")
        and _block(groups, size) is not None
        and columns % _COLUMNS[-1] == 0
    )


def few_rows_of_codes_on_gpu(
    x: Array, codes: Array, others: Sequence[Array], widen: Widen, interpret: bool = False
) -> Array:
    """Multiplies rows with a packed matrix, in a program for one GPU.

    Args:
      x: [M, I], at most `MOST_ROWS` rows.  Codes of further inputs are not used.
      codes: [groups, inputs of a group, O] of 4 or 8 bits.
      others: arrays [groups or 1, O].
      widen: makes numbers of codes and of the others; they are rounded to the dtype of x.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [P, M, O] float32, whose sum over P is the product.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    groups, size, columns = codes.shape
    block, width, parts = _sizes(codes)

    def cut(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((array.shape[0], width), lambda column, part: (0, column))

    flat = codes.reshape(groups * size, columns)
    return pl.pallas_call(
        functools.partial(_product, block, size, parts, widen),
        out_shape=jax.ShapeDtypeStruct((parts, len(x), columns), jnp.float32),
        grid=(columns // width, parts),
        in_specs=[
            pl.BlockSpec(x.shape, lambda column, part: (0, 0)),
            cut(flat),
            *map(cut, others),
        ],
        out_specs=pl.BlockSpec((None, len(x), width), lambda column, part: (part, 0, column)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="few_rows_of_codes",
    )(x, flat, *others)


def parts_of_codes(codes: Array) -> int:
    """Returns the number P of parts in which a matrix is multiplied."""
    return _sizes(codes)[2]


def _sizes(codes: Array) -> tuple[int, int, int]:
    """Returns the inputs of a block, the columns of a program, and the parts."""
    groups, size, columns = codes.shape
    block = _block(groups, size)
    assert block is not None
    width = next(width for width in _COLUMNS if columns % width == 0)
    blocks, parts = groups * size // block, 1
    while (
        parts < _MOST_PARTS
        and parts * columns // width < _PROGRAMS
        and blocks % (2 * parts) == 0
        and blocks * block // (2 * parts) >= _LEAST
    ):
        parts *= 2
    return block, width, parts


def _block(groups: int, size: int) -> int | None:
    """Returns the inputs of a block: whole groups, or an equal part of one; None: there is none."""
    for block in _INPUTS:
        if groups * size % block == 0 and (size % block == 0 or block % size == 0):
            return block
    return None


def _product(
    block: int, size: int, parts: int, widen: Widen, x: Any, codes: Any, *others: Any
) -> None:
    """Computes one part of some columns; arguments but the first four are references."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *others, out = others
    (rows, inputs), (places, width) = x.shape, codes.shape
    part, each = pl.program_id(1), places // block // parts
    share = min(block, size)  # of a group, in a block
    tiles = [jnp.arange(_ROWS) + first for first in range(0, rows, _ROWS)]

    def of_groups(array: Any, first: Array) -> Array:
        if array.shape[0] == 1:
            return triton.load(array.at[:, :])
        return triton.load(array.at[pl.ds(first, block // share), :])

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        start = number * block
        held = triton.load(codes.at[pl.ds(start, block), :])
        if held.dtype.name in ("int4", "uint4"):
            held = held.astype(jnp.int8 if held.dtype.name == "int4" else jnp.uint8)
        group = start // size
        wide = widen(
            held.reshape(block // share, share, width),
            [of_groups(array, group) for array in others],
        )
        matrix = wide.reshape(block, width).astype(x.dtype)
        place, made = start + jnp.arange(block)[None], []
        for tile, total in zip(tiles, sums, strict=True):
            at = [jnp.broadcast_to(index, (_ROWS, block)) for index in (tile[:, None], place)]
            there = (at[0] < rows) & (at[1] < inputs)
            some = triton.load(x.at[tuple(at)], mask=there, other=0.0)
            made.append(total + _times(some, matrix))
        return tuple(made)

    zeros = jnp.zeros((_ROWS, width), jnp.float32)
    sums = jax.lax.fori_loop(part * each, (part + 1) * each, step, (zeros,) * len(tiles))
    column = jnp.broadcast_to(jnp.arange(width)[None], (_ROWS, width))
    for tile, total in zip(tiles, sums, strict=True):
        row = jnp.broadcast_to(tile[:, None], (_ROWS, width))
        triton.store(out.at[row, column], total, mask=row < rows)


def _times(x: Array, y: Array) -> Array:
    """Multiplies two matrices; by default those of float32 would be of TensorFloat-32."""
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
