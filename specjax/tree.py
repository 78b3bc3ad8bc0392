"""A tree of tokens is one array, `parent` [N]: node 0 is the root, and parents precede children.

            0 the          node    0  1  2  3  4  5
           / \\             parent -1  0  0  1  1 -1      (node 5 is absent)
     1 cat     2 dog       depth   0  1  1  2  2  0
      / \\
  3 sat  4 ran             the ancestors of node 4, itself included: 0, 1, 4

`Tree` holds arrays that are computed from `parent`.  All functions take one row; vmap them over a
batch.
"""

from __future__ import annotations

from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.checks import settle
from specjax._internal.prefix_sums import running_sum
from specjax.types import ABSENT


@struct.dataclass
class Tree:
    """Arrays computed from the parents of one row's tree, once per step (vmapped: a leading B)."""

    parent: Array  # [N] int32
    depth: Array  # [N] int32
    ancestors: Array  # [N, N] bool: is m an ancestor of n, or n itself?
    path: Array  # [N, D + 1] int32; the nodes from the root to each node, padded with that node

    @classmethod
    def of(cls, parent: Array, max_depth: int, is_chain: bool = False) -> Self:
        """Computes the arrays from `parent` [N].  With `is_chain`, absent nodes have depths too."""
        num_nodes = parent.shape[0]
        node = jnp.arange(num_nodes, dtype=jnp.int32)
        if is_chain:
            path_ = jnp.minimum(node[:, None], jnp.arange(max_depth + 1, dtype=jnp.int32))
            return cls(parent, node, node[:, None] >= node, path_)
        mask = ancestor_mask(parent)
        return cls(parent, mask.sum(-1, dtype=jnp.int32) - 1, mask, _paths(mask, max_depth))

    def path_tokens(self, tokens: Array) -> Array:
        """[N] -> [N, D] tokens on the path to each node, root excluded, padded with ABSENT."""
        below = jnp.arange(1, self.path.shape[-1]) <= self.depth[:, None]
        return jnp.where(below, tokens[self.path[:, 1:]], ABSENT)


def chain(num_nodes: int) -> np.ndarray:
    """Returns the parents of a chain: -1, 0, 1, ...

    Example:
      >>> chain(4)
      array([-1,  0,  1,  2], dtype=int32)
    """
    return np.arange(num_nodes, dtype=np.int32) - 1


def from_choices(choices: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Returns the parents of a static tree in Medusa's notation.

    For example (1, 0) is the best child of the root's second-best child.  Nodes are ordered by
    depth, then by choice; the root is added as node 0.

    Raises:
      ValueError: a choice occurs twice, or its parent or its better sibling is not among the
        choices.

    Example:
      >>> from_choices(((0,), (1,), (0, 0)))
      array([-1,  0,  0,  1], dtype=int32)
    """
    ordered = sorted(choices, key=lambda c: (len(c), c))
    index = {(): 0, **{choice: n for n, choice in enumerate(ordered, start=1)}}
    if len(index) != len(ordered) + 1 or () in choices:
        raise ValueError(f"choices must be distinct and not empty: {choices}")
    for choice in ordered:
        above, better = choice[:-1], (*choice[:-1], choice[-1] - 1)
        orphan = above not in index
        gap = choice[-1] != 0 and better not in index
        settle(
            (orphan, f"choice {choice} has no parent: add {above} to the choices"),
            (gap, f"choice {choice} has no better sibling: add {better} to the choices"),
        )
    return np.array([ABSENT, *(index[choice[:-1]] for choice in ordered)], np.int32)


def ancestor_mask(parent: Array) -> Array:
    """[N] -> [N, N] bool: entry (n, m) is True if m is an ancestor of n, or n itself.

    It is the transitive closure of (I | parent).  Repeated squaring adds paths of length 1, 2, 4,
    ..., so there is no loop over nodes.
    """
    num_nodes = parent.shape[0]
    mask = (jnp.eye(num_nodes, dtype=bool) | (parent[:, None] == jnp.arange(num_nodes))).astype(
        jnp.float32
    )
    for _ in range(max(1, (num_nodes - 1).bit_length())):
        mask = jnp.minimum(mask @ mask, 1)
    return mask > 0


def depth(parent: Array) -> Array:
    """[N] -> [N] int32: the number of ancestors of each node.  Absent nodes get 0."""
    return ancestor_mask(parent).sum(-1, dtype=jnp.int32) - 1


def path(parent: Array, node: Array, max_depth: int) -> Array:
    """[N], [] -> [max_depth + 1] int32: the nodes from the root to `node`, padded with `node`."""
    return _paths(ancestor_mask(parent), max_depth)[node]


def _paths(ancestors: Array, max_depth: int) -> Array:
    """[N, N] -> [N, max_depth + 1]: the ancestors of each node in index order: its path."""
    num_nodes = ancestors.shape[0]
    rank = running_sum(ancestors.astype(jnp.int32)) - 1  # [N, M]
    step = jnp.arange(max_depth + 1)[:, None]
    index = jnp.arange(num_nodes)
    node = jnp.sum(jnp.where(ancestors[:, None] & (rank[:, None] == step), index, 0), axis=-1)
    return jnp.where(step[:, 0] <= rank[:, -1:], node, index[:, None]).astype(jnp.int32)


def path_tokens(tokens: Array, parent: Array, max_depth: int) -> Array:
    """[N], [N] -> [N, max_depth]: the tokens on the path to each node, as `Tree.path_tokens`."""
    return Tree.of(parent, max_depth).path_tokens(tokens)


def prune(parent: Array, known: Array) -> Array:
    """[N], [N] bool -> [N]: the parents, with unknown nodes and their descendants made absent."""
    kept = (known | ~ancestor_mask(parent)).all(-1)
    return jnp.where(kept, parent, ABSENT)


def asked(parent: Array, way: Array, num_accepted: Array) -> Array:
    """[D + 1] bool: True at each depth at which the rule judged a draft below the accepted node.

    The rule judged one if the accepted node has a child.

    Args:
      parent: [N].
      way: [D + 1] the accepted nodes, root first, padded with the last of them.
      num_accepted: [] the number of drafts among them.
    """
    has_child = (parent[None, :] == way[:, None]).any(1)
    return has_child & (jnp.arange(len(way)) <= num_accepted)
