"""`best_nodes`: the most promising nodes of a tree, before all that are left out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax.types import ABSENT, Proposal


def ranked(proposal: Proposal) -> tuple[Array, Array]:
    """Returns the chances [B, N] of all nodes, best first, and the place [B, N] of each node.

    The root is first, with a chance of 1; absent nodes have none.
    """
    assert proposal.chance is not None
    chance = jnp.where(proposal.parent == ABSENT, 0.0, proposal.chance).at[:, 0].set(jnp.inf)
    # A parent comes before its children and has at least their chance, and so has a better
    # sibling, so the best nodes are a tree.
    order = jnp.argsort(-chance, axis=1)
    best = jnp.take_along_axis(chance, order, axis=1).at[:, 0].set(1.0)
    return best, jnp.argsort(order, axis=1)


def best_nodes(proposal: Proposal, place: Array, width: Array) -> Proposal:
    """Keeps the `width` [B] best nodes of each row, by their `place` from `ranked`.

    They keep their order, and come before those that are left out, which become absent.
    """
    parent = proposal.parent
    assert proposal.chance is not None
    drafted = (parent != ABSENT) & (proposal.chance > 0)
    kept = (place < width[:, None]) & drafted.at[:, 0].set(True)
    moved = jnp.argsort(~kept, axis=1, stable=True)
    index = jnp.argsort(moved, axis=1).astype(jnp.int32)
    up = jnp.take_along_axis(index, jnp.maximum(parent, 0), axis=1)
    up = jnp.where(kept & (parent != ABSENT), up, ABSENT)

    def take(x: Array | None) -> Array | None:
        return None if x is None else jax.vmap(lambda row, at: row[at])(x, moved)

    tokens, parent = (jnp.take_along_axis(x, moved, axis=1) for x in (proposal.tokens, up))
    return dataclasses.replace(
        proposal,
        tokens=tokens,
        parent=parent,
        logits=take(proposal.logits),
        chance=take(proposal.chance),
        given=take(proposal.given),
    )
