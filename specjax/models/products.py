"""Products of activations with weights, in a form that a CPU multiplies fast.

XLA:CPU has fast kernels for bfloat16 only if the result is float32 and if there are at least two
rows: a bfloat16 product of one row, or with a bfloat16 result, takes 10 to 20 times as long.
Padding the row and rounding afterwards gives the same result: products are summed in float32 in any
case, and rounded once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import DotDimensionNumbers


def dot_general(x: Array, kernel: Array, dimensions: DotDimensionNumbers) -> Array:
    """`jax.lax.dot_general` of activations [..., in] and a matrix, in the dtype of x.

    `dimensions` must contract the last axis of x.
    """
    if jax.default_backend() != "cpu" or x.dtype == jnp.float32:
        return jax.lax.dot_general(x, kernel, dimensions)
    ((_, (summed,)), _) = dimensions
    rows = x.reshape(-1, x.shape[-1])
    y = float32_dot_general(two_rows(rows), kernel, (((1,), (summed,)), ((), ())))
    return y[: len(rows)].astype(x.dtype).reshape(*x.shape[:-1], -1)


def two_rows(x: Array) -> Array:
    """`x` [..., M, K], where a single row is padded to two if a CPU would be slow otherwise."""
    if x.shape[-2] > 1 or x.dtype == jnp.float32 or jax.default_backend() != "cpu":
        return x
    return jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)))


def float32_dot_general(x: Array, y: Array, dimensions: DotDimensionNumbers) -> Array:
    """`jax.lax.dot_general` with a float32 result.

    XLA:CPU before jax 0.10 has no bfloat16 product with a float32 result.  There both inputs are
    converted to float32, which does not change the result.
    """
    if jax.__version_info__ < (0, 10) and jax.default_backend() == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
