"""GPTQ: rounds a matrix column by column, and the columns that follow take up the error.

    min over codes  tr((W - Q) H (W - Q)^T),   H = sum of x x^T over the inputs x of a text

With U the upper Cholesky factor of H's inverse, column j leaves the error
e_j = (w_j - q_j) / U[j, j], and every later column k changes by -e_j U[j, k].  The scales are those
of rounding to nearest, and columns of greater H[j, j] come first, so no order has to be stored
(static groups with act-order).

qwix has GPTQ too (0.1.8).  It keeps the H of all matrices at once, takes all of them from the
model before it is rounded, has scales that follow the changed columns, and imports `flax.nnx`,
which this package does not.

Reference: Frantar et al. 2022, arXiv 2210.17323, equations 2 to 4 and section 3.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.files import Packed, Scales, scales_for

_BLOCK = 128
"""The columns after which the others are changed at once."""

_DAMPING = (0.01, 0.1, 1.0)
"""Shares of H's mean diagonal that are added to it; the first for which it has a factor."""


def solved(matrix: np.ndarray, products: Array, bits: int, group: int) -> Packed:
    """Returns [out, in] float32 in few bits, for inputs whose products `products` are [in, in].

    `group` divides the inputs.
    """
    half = 2 ** (bits - 1)
    scales = scales_for(matrix, group, bits)
    steps = jnp.asarray(np.repeat(scales.astype(np.float32), group, axis=-1))
    diagonal = jnp.diag(products)
    order = jnp.argsort(-diagonal)
    unused = jnp.where(diagonal == 0, 1.0, 0.0)  # inputs that were always 0
    h = (products + jnp.diag(unused))[order][:, order]
    factor = next(u for u in (_factor(h, share) for share in _DAMPING) if _is_finite(u))
    codes = _codes(jnp.asarray(matrix)[:, order], factor, steps[:, order], half)
    back = jnp.zeros_like(codes).at[:, order].set(codes)
    return Packed(np.asarray(back).astype(np.uint8), Scales(scales), group, bits, offset=half)


def _is_finite(factor: Array) -> bool:
    return bool(jnp.isfinite(factor).all())


@jax.jit
def _factor(h: Array, share: float) -> Array:
    """Returns the upper Cholesky factor of the inverse of H with its diagonal enlarged."""
    size = len(h)
    h = h + jnp.eye(size) * (share * jnp.mean(jnp.diag(h)))
    with jax.default_matmul_precision("highest"):
        lower = jnp.linalg.cholesky(h)
        inverse = jax.scipy.linalg.cho_solve((lower, True), jnp.eye(size))
        return jnp.linalg.cholesky(inverse).T


@functools.partial(jax.jit, static_argnums=3)
def _codes(matrix: Array, factor: Array, steps: Array, half: int) -> Array:
    """Returns the codes [out, in] in [0, 2 half), for columns in their order."""
    outputs, inputs = matrix.shape
    count = -(-inputs // _BLOCK)
    more = count * _BLOCK - inputs
    wide = jnp.pad(matrix, ((0, 0), (0, more)))
    steps = jnp.pad(steps, ((0, 0), (0, more)), constant_values=1.0)
    factor = jnp.pad(factor, (0, more)) + jnp.diag(jnp.arange(inputs + more) >= inputs)
    places = jnp.arange(_BLOCK)

    def column(
        j: Array, state: tuple[Array, Array, Array], u: Array, step: Array
    ) -> tuple[Array, Array, Array]:
        part, codes, errors = state
        own, size = part[:, j], step[:, j]
        code = jnp.where(size > 0, jnp.round(own / jnp.where(size > 0, size, 1)), 0)
        code = jnp.clip(code, -half, half - 1)
        error = (own - code * size) / u[j, j]
        part = part - error[:, None] * jnp.where(places > j, u[j], 0)
        return part, codes.at[:, j].set(code), errors.at[:, j].set(error)

    def block(b: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        wide, codes = state
        first = b * _BLOCK

        def cut(each: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(each, first, _BLOCK, 1)

        rows = jax.lax.dynamic_slice_in_dim(factor, first, _BLOCK)
        begin = cut(wide), jnp.zeros((outputs, _BLOCK)), jnp.zeros((outputs, _BLOCK))
        turn = functools.partial(column, u=cut(rows), step=cut(steps))
        _, made, errors = jax.lax.fori_loop(0, _BLOCK, turn, begin)
        later = jnp.arange(inputs + more) >= first + _BLOCK
        wide = wide - errors @ jnp.where(later, rows, 0)
        return wide, jax.lax.dynamic_update_slice_in_dim(codes, made, first, 1)

    _, codes = jax.lax.fori_loop(0, count, block, (wide, jnp.zeros_like(wide)))
    return codes[:, :inputs] + half
