"""A sum and the RMS norm of it, as one kernel for an NVIDIA GPU.

XLA:GPU cuts a product of few rows into parts, adds the parts and the residual stream by one kernel,
and norms the stream by the next.  This kernel does both, in a program for each row.  The parts are
added in their order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

MOST_NORMED_ROWS = 64
"""The most rows for which this pays: a row is a program, and other kernels cut rows."""

_LEAST, _MOST = 256, 16
"""The fewest numbers that a part of a product adds, and the most parts."""


def parts_of_products(summed: int) -> int:
    """Returns the number of parts of a product that adds `summed` numbers for each output."""
    parts = 1
    while parts < _MOST and summed % (2 * parts) == 0 and summed // (2 * parts) >= _LEAST:
        parts *= 2
    return parts


def summed_norm_on_gpu(
    stream: Array,
    parts: Array,
    weight: Array,
    eps: float,
    offset: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Adds a product to the residual stream, and norms the sum, in a program for one GPU.

    Args:
      stream: [..., E].
      parts: [P, ..., E] float32, whose sum is the product.
      weight: [E] of the norm, to which `offset` is added.
      eps: of the norm.
      offset: 0, or the sum of weight and offset is multiplied before the norm is rounded.
      interpret: compute what the kernel computes, on any platform, slowly.

    Returns:
      The new stream and its norm, [..., E] of the stream's dtype.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    size = stream.shape[-1]
    rows = stream.size // size

    def of_row(*shape: int) -> Any:
        return pl.BlockSpec((*shape, None, size), lambda row: (*(0 for _ in shape), row, 0))

    made = jax.ShapeDtypeStruct((rows, size), stream.dtype)
    summed, normed = pl.pallas_call(
        functools.partial(_summed_norm, size, eps, offset),
        out_shape=[made, made],
        grid=(rows,),
        in_specs=[of_row(), of_row(len(parts)), pl.BlockSpec((size,), lambda row: (0,))],
        out_specs=[of_row(), of_row()],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="summed_norm",
    )(stream.reshape(rows, size), parts.reshape(len(parts), rows, size), weight)
    return summed.reshape(stream.shape), normed.reshape(stream.shape)


def _summed_norm(
    size: int, eps: float, offset: float, stream: Any, parts: Any, weight: Any, *outs: Any
) -> None:
    from jax.experimental.pallas import triton

    at = jnp.arange(1 << (size - 1).bit_length())  # Triton's arrays have powers of two
    here = at < size

    def read(reference: Any) -> Array:
        return triton.load(reference, mask=here, other=0.0)

    total = read(parts.at[0, at])
    for part in range(1, parts.shape[0]):
        total = total + read(parts.at[part, at])
    x = read(stream.at[at]) + total.astype(stream.dtype)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.sum(y * y) / size + eps)
    scale = read(weight.at[at])
    if offset:
        normed = (y * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    else:
        normed = (scale * y.astype(x.dtype)).astype(x.dtype)
    for out, made in zip(outs, (x, normed), strict=True):
        triton.store(out.at[at], made, mask=here)
