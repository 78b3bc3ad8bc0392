"""Products of few rows with the experts that they chose, as one kernel for an NVIDIA GPU.

XLA:GPU makes of `jax.lax.ragged_dot` a product with every expert, which reads all of them.  This
kernel, written with Pallas for Triton, reads each chosen expert once.

A pair is a token and an expert that it chose.  A program of the kernel has one pair and some
columns of the result.  The first pair of an expert computes the rows of all its tokens, and the
programs of its other pairs do nothing, so no rows are sorted.  The result of a row does not depend
on the other rows: rows are multiplied in tiles of `_ROWS`
tokens, whatever these chose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST_TOKENS = 64
"""The most tokens of a pass; of more, most experts have several tiles of rows anyway."""

_ROWS = 16  # the fewest rows of a product of tensor cores
_BLOCKS = (64, 32, 16)  # inputs and columns that are read at once
_DTYPES = ("bfloat16", "float16", "float32")


def takes_experts_on_gpu(x: Array, chosen: Array, stack: Array) -> bool:
    """Returns whether `few_experts_on_gpu` multiplies these rows with this stack."""
    _, inputs, columns = stack.shape
    return (
        0 < len(chosen) <= MOST_TOKENS
        and x.dtype == stack.dtype
        and stack.dtype.name in _DTYPES
        and inputs % _BLOCKS[-1] == 0
        and columns % _BLOCKS[-1] == 0
    )


def few_experts_on_gpu(
    x: Array, chosen: Array, stacks: Sequence[Array], interpret: bool = False
) -> list[Array]:
    """Multiplies the row of each pair with the matrix of its expert, in a program for one GPU.

    Args:
      x: [T * K, I], the rows; the K pairs of a token follow each other.
      chosen: [T, K] int32, the experts of each token, which are distinct; T at most `MOST_TOKENS`.
      stacks: matrices [E, I, O] of the dtype of x, all of one shape.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      [T * K, O] of the dtype of x for each stack.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    pairs, (_, inputs, columns) = len(x), stacks[0].shape
    width = _block(columns)
    whole = pl.BlockSpec(x.shape, lambda pair, part: (0, 0))
    shape = jax.ShapeDtypeStruct((pairs, columns), x.dtype)
    made = pl.pallas_call(
        functools.partial(_products, len(stacks), _block(inputs), width),
        out_shape=[shape] * len(stacks),
        grid=(pairs, columns // width),
        in_specs=[
            whole,
            pl.BlockSpec(chosen.shape, lambda pair, part: (0, 0)),
            *(pl.BlockSpec(stack.shape, lambda pair, part: (0, 0, 0)) for stack in stacks),
        ],
        out_specs=[pl.BlockSpec(shape.shape, lambda pair, part: (0, 0)) for _ in stacks],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="few_experts",
    )(x, chosen, *stacks)
    return list(made)


def _block(size: int) -> int:
    return next(block for block in _BLOCKS if size % block == 0)


def _power(size: int) -> int:
    """Returns the next power of two: the arrays of Triton have such sizes."""
    return 1 << (size - 1).bit_length()


def _products(count: int, block: int, width: int, x: Any, chosen: Any, *others: Any) -> None:
    """Computes `width` columns for all tokens of one pair's expert; all arguments are references.

    Args:
      count: of the stacks.
      block: inputs that are multiplied at once.
      width: columns.
      x, chosen: as in `few_experts_on_gpu`.
      others: the stacks, and the results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    stacks, out = others[:count], others[count:]
    tokens, each = chosen.shape
    pair, part = pl.program_id(0), pl.program_id(1)
    expert = triton.load(chosen.at[pair // each, pair % each])

    # Of all pairs [T, K], padded: which are of this expert?
    height = max(_ROWS, _power(tokens))
    token = jnp.broadcast_to(jnp.arange(height)[:, None], (height, _power(each)))
    rank = jnp.broadcast_to(jnp.arange(_power(each))[None], token.shape)
    there = (token < tokens) & (rank < each)
    held = triton.load(
        chosen.at[jnp.minimum(token, tokens - 1), jnp.minimum(rank, each - 1)], mask=there, other=-1
    )
    same = (held == expert).astype(jnp.int32)
    before = (same * (token * each + rank < pair)).sum()
    blocks = jnp.where(before == 0, jnp.int32(x.shape[1] // block), jnp.int32(0))
    rows = []
    for first in range(0, tokens, _ROWS):
        tile = jnp.arange(_ROWS) + first
        mine = (token[None] == tile[:, None, None]).astype(jnp.int32) * same[None]
        row = tile * each + (mine * rank[None]).sum((1, 2))
        # In place of a token that did not choose the expert, this pair is computed again.
        rows.append(jnp.where(mine.sum((1, 2)) > 0, row, pair))

    def step(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        place, shape = number * block + jnp.arange(block)[None], (_ROWS, block)
        inputs = [triton.load(x.at[_both(row[:, None], place, shape)]) for row in rows]
        at = expert, pl.ds(number * block, block), pl.ds(part * width, width)
        matrices = [triton.load(stack.at[at]) for stack in stacks]
        products = [_product(some, matrix) for matrix in matrices for some in inputs]
        return tuple(total + more for total, more in zip(sums, products, strict=True))

    zeros = jnp.zeros((_ROWS, width), jnp.float32)
    sums = jax.lax.fori_loop(jnp.int32(0), blocks, step, (zeros,) * (count * len(rows)))
    column, shape = part * width + jnp.arange(width)[None], (_ROWS, width)
    for number, total in enumerate(sums):
        made, row = out[number // len(rows)], rows[number % len(rows)]
        triton.store(
            made.at[_both(row[:, None], column, shape)],
            total.astype(made.dtype),
            mask=jnp.full(shape, before == 0),
        )


def _both(row: Array, column: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    return jnp.broadcast_to(row, shape), jnp.broadcast_to(column, shape)


def _product(x: Array, y: Array) -> Array:
    """Multiplies two matrices; by default those of float32 would be of TensorFloat-32."""
    return jax.lax.dot_general(
        x,
        y,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
