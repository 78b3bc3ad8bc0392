"""x @ w for few rows of x."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import warnings

import jax
import jax.numpy as jnp
from jax import Array

MOST_ROWS = {"float32": 8, "bfloat16": 16, "int8": 16}
"""By the dtype of the weights.  More rows are bound by computation, where XLA is faster."""

_FORMS = {("float32", 0): jnp.float32, ("bfloat16", 1): jnp.float32, ("int8", 1): jnp.int32}
"""(dtype of the weights, the axis that is summed): the dtype of the result."""

_SYSTEMS, _PROCESSORS = ("Linux", "Darwin"), ("x86_64", "amd64", "aarch64", "arm64")
_LLVMLITE = (0, 45)


@functools.cache
def _target(dtype: str) -> str | None:
    """The name of the kernel for weights of this dtype, or None where it cannot be made."""
    if not usable():
        return None
    try:
        from specjax.kernels.calling import registered  # needs llvmlite

        return registered(dtype)
    except Exception as error:  # LLVM or XLA may refuse, which only costs speed
        warnings.warn(
            f"no kernel for {dtype} on this CPU, so XLA multiplies few rows more slowly: {error}",
            stacklevel=2,
        )
        return None


def usable() -> bool:
    """Whether kernels are made here: llvmlite is installed, on a known system and processor."""
    if platform.system() not in _SYSTEMS or platform.machine().lower() not in _PROCESSORS:
        return False
    try:
        version = importlib.metadata.version("llvmlite")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= _LLVMLITE


def takes(rows: int, weights: Array, summed: int) -> bool:
    """Whether `few_rows` multiplies this many rows with a matrix along its axis `summed`."""
    return (
        weights.ndim == 2
        and weights.size > 0
        and (weights.dtype.name, summed) in _FORMS
        and 0 < rows <= MOST_ROWS[weights.dtype.name]
        and _target(weights.dtype.name) is not None
    )


def few_rows(x: Array, weights: Array, summed: int) -> Array:
    """x @ weights, in a program for one CPU.

    Args:
      x: [M, K], M at most as `MOST_ROWS` says; of int8 for int8 weights, else of any dtype.
      weights: [K, N] float32 with summed=0, or [N, K] bfloat16 or int8 with summed=1.

    Returns:
      [M, N] float32, or int32 for int8.
    """
    target = _target(weights.dtype.name)
    if target is None:
        raise ValueError(f"no kernel for {weights.dtype.name} on this CPU; ask `takes` first")
    result = _FORMS[weights.dtype.name, summed]
    x = x.astype(jnp.int16 if result == jnp.int32 else jnp.float32)
    shape = jax.ShapeDtypeStruct((len(x), weights.shape[1 - summed]), result)
    call = jax.ffi.ffi_call(target, shape, vmap_method="sequential")
    return call(x, weights)
