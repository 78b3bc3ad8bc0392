"""`write`: puts new entries into the buffer of each row, from the row's own place on."""

from __future__ import annotations

import functools

import jax
from jax import Array

_UNROLLED_ROWS = 8


def write(buffer: Array, new: Array, start: Array) -> Array:
    """Writes `new` [B, T, ...] into `buffer` [B, L, ...] from slot `start` [B] on.

    L is at least start + T: otherwise XLA would move the start.
    """
    rows = len(buffer)
    if rows > 1:
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(update)(buffer, new, start)
    # A vmapped update becomes a scatter, which is a dozen operations for one row.
    return jax.lax.dynamic_update_slice_in_dim(buffer, new, start[0], axis=1)
