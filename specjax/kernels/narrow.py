"""Computes x @ w for few rows of x, where w is a matrix or one of a stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.processors import processors
from specjax.kernels import available

_MOST_ROWS = {
    8: {"float32": 20, "bfloat16": 16, "bfloat16_columns": 64, "int8": 64},
    16: {"float32": 48, "bfloat16": 20, "bfloat16_columns": 48, "int8": 64},
}
"""The most rows for which the kernels were as fast as XLA or faster, by the float32 numbers of a
vector and the dtype of the weights; matrices in bfloat16 [in, out] have a name of their own, and
XLA would write them in float32 first.
"""

FEW_PROCESSORS = 8
_PANELS = {
    8: {"float32": 512, "bfloat16_columns": 512, "bfloat16": 128, "int8": 512},
    16: {"float32": 128, "bfloat16_columns": 128},
}
"""The same on so many processors.  On two, products of 64 and 128 rows took 0.7 to 1.0 of XLA's
time, and XLA's may spread over many better.  With vectors of 8 numbers, prompts of 144 to 400
tokens took 0.76 to 0.94, in int8 0.80, and in bfloat16 passes of 32, 64 and 128 rows took 0.65,
0.74 and 0.86.
"""

_UNMEASURED = 16
"""The most rows for processors with other vectors."""

_FORMS = {
    ("float32", 0): jnp.float32, ("bfloat16", 0): jnp.float32, ("bfloat16", 1): jnp.float32,
    ("int8", 1): jnp.int32,
}  # fmt: skip
"""The dtype of the result for each (dtype of the weights, axis that is summed)."""


def takes(rows: int, weights: Array, summed: int) -> bool:
    """Returns whether `few_rows` multiplies this many rows along the matrix's axis `summed`."""
    return (
        weights.ndim == 2
        and weights.size > 0
        and (weights.dtype.name, summed) in _FORMS
        and 0 < rows <= most_rows(_kind_of(weights, summed))
        and available.made("product", _kind_of(weights, summed)) is not None
    )


def _kind_of(weights: Array, summed: int) -> str:
    kind = weights.dtype.name
    return "bfloat16_columns" if (kind, summed) == ("bfloat16", 0) else kind


def widens_columns() -> bool:
    """Returns whether matrices [in, out] in bfloat16 save time where numbers are float32.

    XLA widens the whole matrix in each pass whose rows the kernel does not take, and the kernel
    takes enough rows only on few processors of a measured kind.
    """
    return available.lanes() in _MOST_ROWS and processors() <= FEW_PROCESSORS


def most_rows(dtype: str) -> int:
    """Returns the most rows for weights of this dtype, on this processor."""
    lanes = available.lanes()
    known, panels = _MOST_ROWS.get(lanes), _PANELS.get(lanes, {})
    if dtype in panels and processors() <= FEW_PROCESSORS:
        return panels[dtype]
    return _UNMEASURED if known is None else known[dtype]


def few_rows(x: Array, weights: Array, summed: int) -> Array:
    """Computes x @ weights, in a program for one CPU.

    The kernel reads [B, N, K] as it is: XLA moves a reshape between two layers from one layer to
    the next, simplifies the whole program after each, and so compiles for a time that grows with
    the square of the layers.

    Args:
      x: [B, N, K] or [N, K], at most `most_rows` rows; of int8 for int8 weights, else of any dtype.
      weights: [K, M] float32 or bfloat16 with summed=0, or [M, K] bfloat16 or int8 with summed=1.

    Returns:
      [B, N, M] or [N, M] in float32, or int32 for int8.
    """
    kind = _kind_of(weights, summed)
    if kind == "bfloat16" != x.dtype.name:
        kind = "bfloat16_exact"
    target = available.made("product", kind)
    if target is None:
        raise ValueError(f"no kernel for {kind} on this CPU; ask `takes` first")
    result = _FORMS[weights.dtype.name, summed]
    x = x.astype(jnp.int16 if result == jnp.int32 else jnp.float32)
    return _called(target, x, weights.shape[1 - summed], result, weights)


def _called(target: str, x: Array, columns: int, result: DTypeLike, *given: Array) -> Array:
    """Calls a kernel of [B, N, K] with x, which may lack leading axes."""
    rows = x.reshape(-1, *(1, *x.shape)[-2:])
    shape = jax.ShapeDtypeStruct((*rows.shape[:2], columns), result)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(rows, *given).reshape(*x.shape[:-1], columns)


def takes_stacked(weights: Array) -> bool:
    """Returns whether `few_rows_of` multiplies with matrices of this stack."""
    return (
        weights.ndim == 3
        and weights.size > 0
        and weights.dtype.name in ("float32", "bfloat16")
        and available.made("stacked", weights.dtype.name) is not None
    )


def few_rows_of(x: Array, weights: Array, number: Array) -> Array:
    """Computes x @ weights[number], in a program for one CPU, without a copy of that matrix.

    Args:
      x: [M, K] of any dtype.
      weights: [E, K, N], in float32 or bfloat16.
      number: a whole number in [0, E); any other reads memory that is not the stack's.

    Returns:
      [M, N] float32.
    """
    target = available.made("stacked", weights.dtype.name)
    if target is None:
        raise ValueError(
            f"no kernel for a stack of {weights.dtype.name} on this CPU; ask `takes_stacked` first"
        )
    chosen = number.astype(jnp.int32).reshape(1)
    x = x.astype(jnp.float32)
    return _called(target, x, weights.shape[2], jnp.float32, weights, chosen)
