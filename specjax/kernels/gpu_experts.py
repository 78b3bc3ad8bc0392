"""Products of few rows with the experts that they chose, as one kernel for an NVIDIA GPU.

XLA:GPU makes of `jax.lax.ragged_dot` a product with every expert, which reads all of them.  This
kernel, written with Pallas for Triton, reads each chosen expert once.  Packed experts are widened
in registers, as in `gpu_codes.py`.

A pair is a token and an expert that it chose.  A program of the kernel has one pair and some
columns of the result.  The first pair of an expert computes the rows of all its tokens, and the
programs of its other pairs do nothing, so no rows are sorted.  The result of a row does not depend
on the other rows: rows are multiplied in tiles of `ROWS`
tokens, whatever these chose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels.gpu_codes import ROWS, GpuCodes, Widen, read_block, times

_COLUMN = 128  # the bytes of a column of a block, at most: several stacks have one at once


def takes_experts_on_gpu(x: Array, chosen: Array, stack: GpuCodes) -> bool:
    """Returns whether `few_experts_on_gpu` multiplies these rows with this stack."""
    return stack.takes(len(chosen), x.dtype)


def few_experts_on_gpu(
    x: Array, chosen: Array, stacks: Sequence[GpuCodes], interpret: bool = False
) -> list[Array]:
    """Multiplies the row of each pair with the matrix of its expert, in a program for one GPU.

    Args:
      x: [T * K, I], the rows; the K pairs of a token follow each other.
      chosen: [T, K] int32, the experts of each token, which are distinct; T at most `MOST_ROWS`.
      stacks: matrices [E, I, O] of equal `shapes`; their numbers are rounded to the dtype of x.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [T * K, O] of the dtype of x for each stack.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    pairs, columns, width = len(x), stacks[0].columns, stacks[0].width
    block = stacks[0].block(x.dtype, _COLUMN)
    assert width is not None and block is not None
    shape = jax.ShapeDtypeStruct((pairs, columns), x.dtype)
    arrays = [array for stack in stacks for array in stack.flat()]

    def cut(array: Array) -> pl.BlockSpec:
        return pl.BlockSpec((*array.shape[:-1], width), lambda pair, part: (0, 0, part))

    made = pl.pallas_call(
        functools.partial(_products, stacks[0].group, block, [stack.widen for stack in stacks]),
        out_shape=[shape] * len(stacks),
        grid=(pairs, columns // width),
        in_specs=[
            pl.BlockSpec(x.shape, lambda pair, part: (0, 0)),
            pl.BlockSpec(chosen.shape, lambda pair, part: (0, 0)),
            *map(cut, arrays),
        ],
        out_specs=[pl.BlockSpec(shape.shape, lambda pair, part: (0, 0)) for _ in stacks],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="few_experts",
    )(x, chosen, *arrays)
    return list(made)


def _power(size: int) -> int:
    """Returns the next power of two: the arrays of Triton have such sizes."""
    return 1 << (size - 1).bit_length()


def _products(
    group: int, block: int, widens: Sequence[Widen], x: Any, chosen: Any, *references: Any
) -> None:
    """Computes some columns for all tokens of one pair's expert.

    Args:
      group: the inputs of a group.
      block: inputs that are multiplied at once.
      widens: of the stacks.
      x, chosen: references to those of `few_experts_on_gpu`.
      references: to the arrays of each stack, and to the results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    held, out = references[: -len(widens)], references[-len(widens) :]
    (tokens, each), width = chosen.shape, held[0].shape[2]
    pair, part = pl.program_id(0), pl.program_id(1)
    expert = triton.load(chosen.at[pair // each, pair % each])

    # Of all pairs [T, K], padded: which are of this expert?
    height = max(ROWS, _power(tokens))
    token = jnp.broadcast_to(jnp.arange(height)[:, None], (height, _power(each)))
    rank = jnp.broadcast_to(jnp.arange(_power(each))[None], token.shape)
    there = (token < tokens) & (rank < each)
    others = triton.load(
        chosen.at[jnp.minimum(token, tokens - 1), jnp.minimum(rank, each - 1)], mask=there, other=-1
    )
    same = (others == expert).astype(jnp.int32)
    before = (same * (token * each + rank < pair)).sum()
    inputs, count = x.shape[1], held[0].shape[1] // block
    blocks = jnp.where(before == 0, jnp.int32(count), jnp.int32(0))
    rows = []
    for first in range(0, tokens, ROWS):
        tile = jnp.arange(ROWS) + first
        mine = (token[None] == tile[:, None, None]).astype(jnp.int32) * same[None]
        row = tile * each + (mine * rank[None]).sum((1, 2))
        # In place of a token that did not choose the expert, this pair is computed again.
        rows.append(jnp.where(mine.sum((1, 2)) > 0, row, pair))

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        start, shape = number * block, (ROWS, block)
        places = [_both(row[:, None], start + jnp.arange(block)[None], shape) for row in rows]
        some = [triton.load(x.at[at], mask=at[1] < inputs, other=0.0) for at in places]
        each = len(held) // len(widens)
        matrices = [
            read_block(held[i * each : (i + 1) * each], widen, group, start, block, expert)
            for i, widen in enumerate(widens)
        ]
        products = [times(rows, made.astype(x.dtype)) for made in matrices for rows in some]
        return tuple(total + more for total, more in zip(sums, products, strict=True))

    zeros = jnp.zeros((ROWS, width), jnp.float32)
    sums = jax.lax.fori_loop(jnp.int32(0), blocks, step, (zeros,) * (len(widens) * len(rows)))
    column, shape = part * width + jnp.arange(width)[None], (ROWS, width)
    for number, total in enumerate(sums):
        made, row = out[number // len(rows)], rows[number % len(rows)]
        triton.store(
            made.at[_both(row[:, None], column, shape)],
            total.astype(made.dtype),
            mask=jnp.full(shape, before == 0),
        )


def _both(row: Array, column: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    return jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)
