"""Products of activations with weights, as a CPU multiplies them fast.

XLA:CPU has quick kernels for narrow numbers only where the sums come out in float32, and where there are two rows at
least: a bfloat16 product of one row, or with a bfloat16 result, takes 10 to 20 times as long.  Either is a detour with
the same numbers: products sum in float32 in any case, and are rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def dot_general(x: Array, kernel: Array, dimensions: Any) -> Array:
    """`jax.lax.dot_general` of activations [..., in], whose last axis is summed, and a matrix, in the type of x."""
    if jax.default_backend() != "cpu" or x.dtype == jnp.float32:
        return jax.lax.dot_general(x, kernel, dimensions)
    ((_, (summed,)), _) = dimensions
    rows = x.reshape(-1, x.shape[-1])
    y = float32_dot_general(two_rows(rows), kernel, (((1,), (summed,)), ((), ())))
    return y[: len(rows)].astype(x.dtype).reshape(*x.shape[:-1], -1)


def two_rows(x: Array) -> Array:
    """`x` [..., M, K], with a blank behind a single row that a CPU would be slow to multiply."""
    if x.shape[-2] > 1 or x.dtype == jnp.float32 or jax.default_backend() != "cpu":
        return x
    return jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 0)))


def float32_dot_general(x: Array, y: Array, dimensions: Any) -> Array:
    """`jax.lax.dot_general` with a float32 result.

    XLA:CPU before jax 0.10 multiplies no bfloat16 into float32.  There both are widened, which changes no number.
    """
    if jax.__version_info__ < (0, 10) and jax.default_backend() == "cpu":
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)
