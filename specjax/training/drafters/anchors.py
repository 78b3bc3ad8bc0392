"""Draws the positions of a text from which drafts start in a training step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def draw_anchors(keys: Array, learned: Array, count: int) -> tuple[Array, Array]:
    """Returns random positions whose next token is learned, each at most once.

    Args:
      keys: [B] of each row.
      learned: [B, T] 1 where the next token is learned.
      count: A.

    Returns:
      Positions [B, A] in ascending order, at least 1, and whether they are valid [B, A]: a row may
      have fewer.
    """
    usable = learned.at[:, 0].set(0)  # a draft reads the features of a token before it
    drawn = jax.vmap(lambda key: jax.random.uniform(key, learned.shape[1:]))(keys)
    _, at = jax.lax.top_k(drawn + 2 * usable, count)
    at = jnp.sort(at, axis=1)
    return jnp.maximum(at, 1), jnp.take_along_axis(usable, at, axis=1)
