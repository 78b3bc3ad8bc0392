"""A tree of tokens is one array, `parent` [N]: the root is node 0, and every parent comes before its children.

            0 the          node    0  1  2  3  4  5
           / \\             parent -1  0  0  1  1 -1      (node 5 is absent)
     1 cat     2 dog       depth   0  1  1  2  2  0
      / \\
  3 sat  4 ran             the ancestors of node 4, itself included: 0, 1, 4

Three formulas derive the rest, and two more read tokens and verdicts.  All are about one row; vmap
them over a batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.types import ABSENT


def chain(num_nodes: int) -> np.ndarray:
    """The parents of a chain: -1, 0, 1, ..."""
    return np.arange(num_nodes, dtype=np.int32) - 1


def from_choices(choices: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """The parents of a static tree in Medusa's notation: (1, 0) is the best child of the root's second best child.

    Nodes are ordered by depth, then by choice; the root is added.

    Raises:
      ValueError: a choice whose parent, or whose better sibling, is not among the choices, or that stands twice.
    """
    ordered = sorted(choices, key=lambda c: (len(c), c))
    index = {(): 0, **{choice: n for n, choice in enumerate(ordered, start=1)}}
    if len(index) != len(ordered) + 1 or () in choices:
        raise ValueError(f"choices must be distinct and not empty: {choices}")
    for choice in ordered:
        if choice[:-1] not in index:
            raise ValueError(f"choice {choice} has no parent: add {choice[:-1]} to the choices")
        better = (*choice[:-1], choice[-1] - 1)
        if choice[-1] != 0 and better not in index:
            raise ValueError(f"choice {choice} has no better sibling: add {better} to the choices")
    return np.array([ABSENT, *(index[choice[:-1]] for choice in ordered)], np.int32)


def ancestor_mask(parent: Array) -> Array:
    """[N] -> [N, N] bool: is m an ancestor of n, or n itself?

    The closure of (I | parent) by squaring: paths of length 1, 2, 4, ... without a loop over nodes.
    """
    num_nodes = parent.shape[0]
    mask = (jnp.eye(num_nodes, dtype=bool) | (parent[:, None] == jnp.arange(num_nodes))).astype(jnp.float32)
    for _ in range(max(1, (num_nodes - 1).bit_length())):
        mask = jnp.minimum(mask @ mask, 1)
    return mask > 0


def depth(parent: Array) -> Array:
    """[N] -> [N] int32: a node is as deep as it has ancestors.  Absent nodes get 0."""
    return ancestor_mask(parent).sum(-1, dtype=jnp.int32) - 1


def path(parent: Array, node: Array, max_depth: int) -> Array:
    """[N], [] -> [max_depth + 1] int32: the nodes from the root to `node`, padded with `node`.

    Ancestors stand in index order, so the j-th of them is the j-th on the path.
    """
    on_path = ancestor_mask(parent)[node]
    rank = jnp.cumsum(on_path) - 1
    place = jnp.arange(max_depth + 1)[:, None]
    index = jnp.arange(parent.shape[0])
    found = jnp.sum(jnp.where(on_path & (rank == place), index, 0), axis=-1)
    return jnp.where(place[:, 0] <= rank[-1], found, node).astype(jnp.int32)


def path_tokens(tokens: Array, parent: Array, max_depth: int) -> Array:
    """[N], [N] -> [N, max_depth] the tokens from below the root to each node, padded with ABSENT."""
    nodes = jax.vmap(lambda node: path(parent, node, max_depth))(jnp.arange(parent.shape[0]))
    there = jnp.arange(1, max_depth + 1) <= depth(parent)[:, None]
    return jnp.where(there, tokens[nodes[:, 1:]], ABSENT)


def asked(parent: Array, way: Array, num_accepted: Array) -> Array:
    """[D + 1] bool: at which depths did a verdict test a draft?

    Where its walk along `way` [D + 1], which is as deep as the accepted drafts, met a node with a
    child.
    """
    has_child = (parent[None, :] == way[:, None]).any(1)
    return has_child & (jnp.arange(len(way)) <= num_accepted)
