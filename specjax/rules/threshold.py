"""`threshold`: keep what the target finds likely enough."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.rules.confidence import check_fraction, confidence, follow
from specjax.types import Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Inexact: keeps a guess while the target's own probability for it is at least `threshold`.

    With `mean` a guess is kept whole or not at all: a chain, or a path from the root of a tree to a leaf, whose
    probabilities are at least `threshold` on average.  Either way the longest path is kept.

    At 0 all that is possible is kept, at 1 only what is certain, so that the text is that of plain decoding.  Numbers
    are structure here: another threshold is another program.
    """

    threshold: float = 0.3
    mean: bool = False

    exact = False
    shared_noise = True

    def __post_init__(self):
        check_fraction(threshold=self.threshold)

    def __call__(self, draw: sampling.SharedDraw, proposal: Proposal, logits: Array, max_depth: int) -> Verdict:
        likely = confidence(proposal, jax.nn.softmax(logits))
        kept = (likely > 0) & (self._averages(proposal, likely) if self.mean else likely >= self.threshold)
        return follow(draw, proposal, logits, kept, max_depth)

    def _averages(self, proposal: Proposal, likely: Array) -> Array:
        """[N] whether a node lies on a path to a leaf that is possible, and likely enough on average."""
        node = jnp.arange(len(likely))
        path = tree.ancestor_mask(proposal.parent)
        guesses = path & (node > 0)
        total = jnp.where(guesses, likely, 0).sum(-1)
        leaf = ~(proposal.parent[None, :] == node[:, None]).any(-1)
        possible = ((likely > 0) | ~guesses).all(-1)
        whole = leaf & possible & (total >= self.threshold * guesses.sum(-1))
        return (path & whole[:, None]).any(0)
