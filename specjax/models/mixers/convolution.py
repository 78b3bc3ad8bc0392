"""A short causal convolution of each channel, along the branches of a tree."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def convolve(x: Array, columns: Array, kernel: Array, ancestors: Array | None = None) -> Array:
    """Returns [B, N, C]: for each node the sum over itself and its K - 1 nearest ancestors.

    Args:
      x: [B, N, C].
      columns: [B, K - 1, C], the inputs before the first node, the oldest first.
      kernel: [K, C], of the oldest token first.
      ancestors: [B or 1, N, N] bool, of each node, itself included; None: each node is the child of
        the node before it.
    """
    size, width = len(kernel), x.shape[1]
    every = jnp.concatenate([columns.astype(x.dtype), x], axis=1)
    kernel = kernel.astype(x.dtype)
    depth = None if ancestors is None else ancestors.sum(-1) - 1  # [B or 1, N]
    out = kernel[-1] * x
    for back in range(1, size):
        if ancestors is None or depth is None:
            before = every[:, size - 1 - back :][:, :width]
        else:
            there = depth[:, :, None] - back  # the depth of the ancestor, below 0 before the root
            found = ancestors & (depth[:, None] == there)
            at = size - 1 + jnp.where(there[..., 0] < 0, there[..., 0], jnp.argmax(found, axis=2))
            at = jnp.broadcast_to(at, x.shape[:2])
            before = jnp.take_along_axis(every, at[..., None], axis=1)
        out = out + kernel[-1 - back] * before
    return out
