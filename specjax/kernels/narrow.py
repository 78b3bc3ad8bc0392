"""Computes x @ w for few rows of x."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.kernels import available

_MOST_ROWS = {
    8: {"float32": 20, "bfloat16": 16, "int8": 64},
    16: {"float32": 48, "bfloat16": 20, "int8": 64},
}
"""The most rows for which the kernels were as fast as XLA or faster, by the float32 numbers of a
vector and the dtype of the weights.
"""

_UNMEASURED = 16
"""The most rows for processors with other vectors."""

_FORMS = {("float32", 0): jnp.float32, ("bfloat16", 1): jnp.float32, ("int8", 1): jnp.int32}
"""The dtype of the result for each (dtype of the weights, axis that is summed)."""


def takes(rows: int, weights: Array, summed: int) -> bool:
    """Returns whether `few_rows` multiplies this many rows along the matrix's axis `summed`."""
    return (
        weights.ndim == 2
        and weights.size > 0
        and (weights.dtype.name, summed) in _FORMS
        and 0 < rows <= most_rows(weights.dtype.name)
        and available.made("product", weights.dtype.name) is not None
    )


def most_rows(dtype: str) -> int:
    """Returns the most rows for weights of this dtype, on this processor."""
    known = _MOST_ROWS.get(available.lanes())
    return _UNMEASURED if known is None else known[dtype]


def few_rows(x: Array, weights: Array, summed: int) -> Array:
    """Computes x @ weights, in a program for one CPU.

    Args:
      x: [M, K], M at most `most_rows`; of int8 for int8 weights, else of any dtype.
      weights: [K, N] float32 with summed=0, or [N, K] bfloat16 or int8 with summed=1.

    Returns:
      [M, N] float32, or int32 for int8.
    """
    target = available.made("product", weights.dtype.name)
    if target is None:
        raise ValueError(f"no kernel for {weights.dtype.name} on this CPU; ask `takes` first")
    result = _FORMS[weights.dtype.name, summed]
    x = x.astype(jnp.int16 if result == jnp.int32 else jnp.float32)
    shape = jax.ShapeDtypeStruct((len(x), weights.shape[1 - summed]), result)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(x, weights)
