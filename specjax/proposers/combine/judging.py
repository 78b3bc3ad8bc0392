"""`right_nodes`: which nodes of a tree the text went through, read or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax.types import ABSENT


def right_nodes(
    tokens: Array, parent: Array, text: Array, count: Array, pending: Array
) -> tuple[Array, Array]:
    """Returns [B, N] bool, the nodes on the way that the text took, and the depth of each node.

    Args:
      tokens, parent: [B, N] of trees.
      text: [B, T] tokens committed after them, the root first.
      count: [B] how many there are; of a row without any no node is right.
      pending: [B] the token after them.
    """
    above = jax.vmap(tree.ancestor_mask)(parent)
    depth = above.sum(-1) - 1
    last = text.shape[1]
    padded = jnp.pad(text, ((0, 0), (0, 1)))
    known = jnp.where(jnp.arange(last + 1) == count[:, None], pending[:, None], padded)
    wanted = jnp.take_along_axis(known, jnp.minimum(depth, last), axis=1)
    matches = (tokens == wanted) & (depth <= count[:, None]) & (count > 0)[:, None]
    present = (parent != ABSENT).at[:, 0].set(True)
    return (matches[:, None] | ~above).all(-1) & present, depth
