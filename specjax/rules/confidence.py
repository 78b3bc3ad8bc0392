"""What rules share that ask how likely the target finds a guess, and so change its distribution.

They see the warped distribution.  So a guess that the settings leave out is never kept, and at temperature 0, where
the target's best token has all the mass, greedy decoding stays greedy decoding.

They share the noise of the proposer, and where no guess is kept the next token is the target's own draw, as under
`match`.  So the better the draft, the less of the distribution is lost: a perfect one loses nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.types import ABSENT, Proposal, Verdict


def check_fraction(**values: float) -> None:
    """Raises ValueError for a value outside [0, 1], or NaN."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value} is not allowed; it must lie in [0, 1]")


def confidence(proposal: Proposal, probs: Array) -> Array:
    """[N] the target's probability of each guess, of `probs` [N, V] after each node; 0 where nothing was guessed."""
    guessed = probs[jnp.maximum(proposal.parent, 0), proposal.tokens]
    return jnp.where(proposal.parent == ABSENT, 0, guessed)


def follow(draw: Any, proposal: Proposal, logits: Array, kept: Array, max_depth: int) -> Verdict:
    """The longest path whose guesses are all `kept` [N] (of equals the first), and then the target's own draw."""
    depth = tree.depth(proposal.parent)
    kept = kept.at[0].set(True)
    whole = (kept | ~tree.ancestor_mask(proposal.parent)).all(-1)
    node = sampling.argmax(jnp.where(whole, depth, -1))
    next_token = sampling.argmax(logits[node] + draw.noise(node, depth[node]))
    return Verdict(tree.path(proposal.parent, node, max_depth), depth[node], next_token)
