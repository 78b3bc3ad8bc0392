"""Keys and values in 8 bits: how a cache stores them, and how attention reads them.

    int8       [..., D + 4]   D whole numbers, and the 4 bytes of the float32 that they are times
    float8     [..., D]       float8_e4m3fn without a scale, in [-448, 448]

A token is rounded by itself, for each head, so that the greatest of its int8 is 127.  So its
numbers do not depend on the pass, the row or the page in which it was written, and a text depends
on its prompt, settings and seed alone, as with other caches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

CACHE_DTYPES = {"int8": jnp.dtype(jnp.int8), "float8": jnp.dtype(jnp.float8_e4m3fn)}
"""The dtypes of 8 bits that a cache may have, by name."""

_SCALE = 4
"""The bytes of a scale."""


def is_rounded(dtype: DTypeLike) -> bool:
    """Returns whether a cache of this dtype holds rounded numbers."""
    return jnp.dtype(dtype) in CACHE_DTYPES.values()


def stored(new: Array, dtype: DTypeLike) -> Array:
    """Returns numbers [..., D] as a cache of `dtype` stores them; what it stores stays as it is."""
    if new.dtype == dtype or not is_rounded(dtype):
        return new.astype(dtype)
    x = new.astype(jnp.float32)
    if jnp.dtype(dtype) != jnp.int8:
        most = float(jnp.finfo(dtype).max)
        return jnp.clip(x, -most, most).astype(dtype)
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    codes = jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    return jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)


def stored_size(size: int, dtype: DTypeLike) -> int:
    """Returns the numbers of `dtype` in which a cache stores `size` numbers."""
    return size + _SCALE * (jnp.dtype(dtype) == jnp.int8)


def read_size(size: int, dtype: DTypeLike) -> int:
    """Returns the numbers that attention reads from `size` stored numbers of `dtype`."""
    return size - _SCALE * (jnp.dtype(dtype) == jnp.int8)


def as_read(x: Array, dtype: DTypeLike) -> Array:
    """Returns what a cache stores as numbers of `dtype`; others are returned as they are."""
    if not is_rounded(x.dtype):
        return x
    if x.dtype != jnp.int8:
        return x.astype(dtype)
    scale = jax.lax.bitcast_convert_type(x[..., -_SCALE:], jnp.float32)[..., None]
    return (x[..., :-_SCALE].astype(jnp.float32) * scale).astype(dtype)
