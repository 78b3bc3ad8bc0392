"""What rules share that ask how likely the target finds a guess, and so change its distribution.

They see the warped distribution.  So a guess that the settings leave out is never kept, and at temperature 0, where
the target's best token has all the mass, greedy decoding stays greedy decoding.

They share the noise of the proposer, and where no guess is kept the next token is the target's own draw, as under
`match`.  So the better the draft, the less of the distribution is lost: a perfect one loses nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling
from specjax.contract import Draw
from specjax.tree import Tree
from specjax.types import ABSENT, Proposal, Verdict


def check_fraction(**values: Any) -> None:
    """Raises ValueError for a value outside [0, 1], or NaN; of an array, one a row, names the first such value."""
    for name, value in values.items():
        # A rule is a pytree: inside a trace it is built again from arrays, which were checked before.
        if not isinstance(value, int | float | np.ndarray):
            continue
        for each in np.ravel(value).tolist():
            if not 0 <= each <= 1:
                raise ValueError(f"{name}={each} is not allowed; it must lie in [0, 1]")


def confidence(proposal: Proposal, probs: Array) -> Array:
    """[N] the target's probability of each guess, of `probs` [N, V] after each node; 0 where nothing was guessed."""
    guessed = probs[jnp.maximum(proposal.parent, 0), proposal.tokens]
    return jnp.where(proposal.parent == ABSENT, 0, guessed)


def follow(draw: Draw, tree: Tree, logits: Array, kept: Array) -> Verdict:
    """The longest path whose guesses are all `kept` [N] (of equals the first), and then the target's own draw."""
    kept = kept.at[0].set(True)
    whole = (kept | ~tree.ancestors).all(-1)
    node = sampling.argmax(jnp.where(whole, tree.depth, -1))
    noise = draw.noise(node[None], tree.depth[node][None])[0]
    return Verdict(node, sampling.argmax(logits[node] + noise))
