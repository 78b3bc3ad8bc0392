"""Which tree of choices is best: how a target's text ranks among the guesses, and a search over what was measured."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import tree
from specjax.contract import Model
from specjax.models import MedusaHeads, medusa_features, medusa_logits
from specjax.parallel import to_host

Choices = tuple[tuple[int, ...], ...]


def measure_ranks(
    model: Model,
    params: Any,
    heads: MedusaHeads,
    arrays: Any,
    target_head: Array | None,
    tokens: Any,
) -> np.ndarray:
    """The rank of what follows among the guesses of each head, at every position of a text read by the target.

    Args:
      model, params: the target.
      heads, arrays: the heads, and their parameters.
      target_head: [E, V], the target's own (version 2).
      tokens: [B, T] texts.  What the target wrote itself measures acceptance; any text measures accuracy on that text.

    Returns:
      [B * (T - 1 - K), K] int32: row t holds the ranks of the tokens t + 2 ... t + 1 + K, 0 being the best guess.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.shape[1] < heads.num_heads + 2:
        raise ValueError(
            f"texts of {tokens.shape[1]} tokens; {heads.num_heads} heads need {heads.num_heads + 2} or more"
        )
    return to_host(_ranks(model, heads, params, arrays, target_head, tokens)).reshape(
        -1, heads.num_heads
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ranks(model, heads, params, arrays, target_head, tokens):
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    places = jnp.arange(width - 1 - heads.num_heads)[:, None]
    hidden = model.apply(params, tokens, positions).hidden[:, : len(places)]

    def row(xs):  # in turn, since logits are large
        hidden, text = xs
        logits = medusa_logits(heads, medusa_features(heads, arrays, hidden), target_head)
        label = text[places + 2 + jnp.arange(heads.num_heads)][..., None]
        own = jnp.take_along_axis(logits, label, axis=-1)
        before = (logits > own) | ((logits == own) & (jnp.arange(logits.shape[-1]) < label))
        return before.sum(-1, dtype=jnp.int32)

    return jax.lax.map(row, (hidden, tokens))


def best_tree(stats: Any, num_nodes: int) -> Choices:
    """The tree of choices that accepts most tokens, measured on the very positions that `stats` tells of.

    A choice (i, j) is right at a position if the token there has rank i, and the next one rank j: its worth is the
    share of positions at which it is right, which is P(i) P(j | i), measured and not multiplied from marginals.  The
    expected number of accepted drafts is the sum over the choices of a tree, since a path of length d that is right
    has d prefixes in the tree.

    A tree holds with a choice its parent (the walk passes it) and its better siblings (which are drawn first).  With
    the left sibling, or for a first child the parent, as its one condition, that is a forest of prefixes: the best
    set of n nodes under a node splits into its own, some below it and some to its right, and dynamic programming over
    that split is exact.  (Where no worse sibling is right more often, it takes the most probable choices.)

    Args:
      stats: [M, D] ranks of the tokens behind each position among the guesses for their depth, 0 being the best, as
        `measure_ranks` returns.
      num_nodes: at most so many, the root included.  Choices that are never right are left out.

    Returns:
      Choices as `Medusa` and `tree.from_choices` take them; () if no choice is ever right.

    Raises:
      ValueError: statistics of another form, or fewer than 2 nodes.
    """
    ranks = np.asarray(stats)
    if (
        ranks.ndim != 2
        or ranks.size == 0
        or not np.issubdtype(ranks.dtype, np.integer)
        or ranks.min() < 0
    ):
        raise ValueError(
            f"stats of shape {list(ranks.shape)} and type {ranks.dtype}; pass ranks [M, D], whole numbers from 0, "
            "as measure_ranks returns"
        )
    if num_nodes < 2:
        raise ValueError(f"num_nodes={num_nodes}; it counts the root too, so it must be at least 2")
    hits, widths = collections.Counter(), collections.Counter()
    for text in map(tuple, ranks.tolist()):
        needed = 0  # nodes of the smallest tree that holds the choice
        for depth, rank in enumerate(text):
            needed += rank + 1
            if needed >= num_nodes:
                break
            hits[text[: depth + 1]] += 1
            widths[text[:depth]] = max(widths[text[:depth]], rank + 1)

    def grow(node):
        """best[n]: the most hits of n nodes below `node`, and those nodes."""
        best = [(0, ())]
        for rank in reversed(range(widths[node])):
            child = (*node, rank)
            inner, right = grow(child), best
            best = [(0, ())] + [(-1, ())] * min(len(inner) + len(right) - 1, num_nodes - 1)
            for m, (below, nodes) in enumerate(inner):
                for n, (beside, others) in enumerate(right[: len(best) - 1 - m], start=m + 1):
                    if hits[child] + below + beside > best[n][0]:
                        best[n] = (hits[child] + below + beside, (child, *nodes, *others))
        return best

    found = max(grow(()), key=lambda entry: (entry[0], -len(entry[1])))
    return tuple(sorted(found[1], key=lambda choice: (len(choice), choice)))


def node_acceptance(stats: Any, choices: Choices) -> np.ndarray:
    """[N] float: how often each node of a tree is right where its parent is (0 where that never was); the root is 1."""
    ranks, parent = np.asarray(stats), tree.from_choices(choices)
    ordered = sorted(choices, key=lambda choice: (len(choice), choice))
    hits = np.array([len(ranks), *((ranks[:, : len(c)] == c).all(1).sum() for c in ordered)])
    return np.append(1.0, hits[1:] / np.maximum(hits[parent[1:]], 1))


def expected_length(stats: Any, choices: Choices) -> float:
    """New tokens per target pass that a tree would have given on the positions of `stats`, 1 being plain decoding."""
    ranks = np.asarray(stats)
    return 1 + sum(float((ranks[:, : len(choice)] == choice).all(1).mean()) for choice in choices)
