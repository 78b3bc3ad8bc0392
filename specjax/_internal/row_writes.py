"""`write`: puts new entries into the buffer of each row, from the row's own place on."""

from __future__ import annotations

import functools

import jax
from jax import Array


def write(buffer: Array, new: Array, start: Array) -> Array:
    """Writes `new` [B, T, ...] into `buffer` [B, L, ...] from slot `start` [B] on.

    L is at least start + T: otherwise XLA would move the start.
    """
    if len(buffer) == 1:  # a vmapped update becomes a scatter, which takes more operations
        return jax.lax.dynamic_update_slice_in_dim(buffer, new, start[0], axis=1)
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    return jax.vmap(update)(buffer, new, start)
