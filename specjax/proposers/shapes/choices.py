"""Finds the best tree of choices: first measures the ranks of tokens, then searches over them."""

from __future__ import annotations

import collections

import numpy as np
from numpy.typing import ArrayLike

from specjax import tree
from specjax._internal.checks import within

Choices = tuple[tuple[int, ...], ...]
"""A tree of fixed shape: for each node except the root the ranks on its path, such as (0, 1) for
the second-best token after the best one.
"""


def best_tree(stats: ArrayLike, num_nodes: int) -> Choices:
    """Returns the tree of choices that accepts the most drafts on the positions of `stats`.

    A choice (i, j) is right at a position if the first token after it has rank i and the second has
    rank j.  The value of a choice is the fraction of positions at which it is right.  That is the
    joint probability P(i) P(j | i), not a product of the marginals of each depth.  The expected
    number of accepted drafts is the sum of the values of a tree's choices, since a right path of
    length d has d prefixes in the tree.

    A tree that contains a choice also contains its parent, because the path leads through it, and
    its better siblings, because they are drawn first.  So each node requires one other node: its
    next better sibling, or its parent if it is the best child.  An optimal set of n nodes then
    consists of a node itself, some nodes below it and some nodes to its right, and dynamic
    programming over that split is exact.  (If better siblings are right at least as often as worse
    ones, the result is the most probable choices.)

    Args:
      stats: [M, D] ranks of the tokens after each position among the predictions for their depth,
        where 0 is the best, as `measure_ranks` returns them.
      num_nodes: the most nodes, the root included.  Choices that are never right are left out.

    Returns:
      Choices as `Medusa` and `tree.from_choices` take them; () if no choice is ever right.

    Raises:
      ValueError: statistics of another form, or fewer than 2 nodes.

    Example:
      >>> best_tree([[0, 0], [0, 1], [1, 0]], num_nodes=3)
      ((0,), (1,))
    """
    ranks = np.asarray(stats)
    if (
        ranks.ndim != 2
        or ranks.size == 0
        or not np.issubdtype(ranks.dtype, np.integer)
        or ranks.min() < 0
    ):
        raise ValueError(
            f"stats of shape {list(ranks.shape)} and type {ranks.dtype}; pass ranks [M, D], "
            "whole numbers from 0, as measure_ranks returns"
        )
    within("num_nodes", num_nodes, 2, note=", since it counts the root too")
    hits: collections.Counter[tuple[int, ...]] = collections.Counter()
    widths: collections.Counter[tuple[int, ...]] = collections.Counter()
    for text in map(tuple, ranks.tolist()):
        needed = 0  # nodes of the smallest tree that holds the choice
        for depth, rank in enumerate(text):
            needed += rank + 1
            if needed >= num_nodes:
                break
            hits[text[: depth + 1]] += 1
            widths[text[:depth]] = max(widths[text[:depth]], rank + 1)

    def grow(node: tuple[int, ...]) -> list[tuple[int, Choices]]:
        """Returns for each n the most hits that n nodes below `node` can have, and those nodes."""
        best: list[tuple[int, Choices]] = [(0, ())]
        unset: list[tuple[int, Choices]] = [(-1, ())]
        for rank in reversed(range(widths[node])):
            child = (*node, rank)
            inner, right = grow(child), best
            best = [(0, ()), *unset * min(len(inner) + len(right) - 1, num_nodes - 1)]
            for m, (below, nodes) in enumerate(inner):
                for n, (beside, others) in enumerate(right[: len(best) - 1 - m], start=m + 1):
                    if hits[child] + below + beside > best[n][0]:
                        best[n] = (hits[child] + below + beside, (child, *nodes, *others))
        return best

    _, choices = max(grow(()), key=lambda entry: (entry[0], -len(entry[1])))
    return tuple(sorted(choices, key=lambda choice: (len(choice), choice)))


def node_acceptance(stats: ArrayLike, choices: Choices) -> np.ndarray:
    """Returns [N] float: the probability that each node is right if its parent is.

    It is 1 for the root, and 0 for a node whose parent is never right.
    """
    ranks, parent = np.asarray(stats), tree.from_choices(choices)
    ordered = sorted(choices, key=lambda choice: (len(choice), choice))
    hits = np.array([len(ranks), *((ranks[:, : len(c)] == c).all(1).sum() for c in ordered)])
    return np.append(1.0, hits[1:] / np.maximum(hits[parent[1:]], 1))


def expected_length(stats: ArrayLike, choices: Choices) -> float:
    """Returns new tokens per target pass with a tree on `stats`; plain decoding has 1."""
    ranks = np.asarray(stats)
    return 1 + sum(float((ranks[:, : len(choice)] == choice).all(1).mean()) for choice in choices)
