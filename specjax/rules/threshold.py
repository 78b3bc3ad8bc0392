"""`threshold`: keep what the target finds likely enough."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.contract import Draw, Rule
from specjax.rules.confidence import check_fraction, confidence, follow
from specjax.tree import Tree
from specjax.types import Proposal, Verdict


@struct.dataclass
class Threshold(Rule):
    """Inexact: keeps a guess while the target's own probability for it is at least `threshold`.

    With `mean` a guess is kept whole or not at all: a chain, or a path from the root of a tree to a leaf, whose
    probabilities are at least `threshold` on average.  Either way the longest path is kept.

    At 0 all that is possible is kept, at 1 only what is certain, so that the text is that of plain
    decoding.  The threshold is a number: another one does not compile.
    """

    threshold: float = 0.3
    mean: bool = struct.field(pytree_node=False, default=False)

    exact = False
    shared_noise = True

    def __post_init__(self):
        check_fraction(threshold=self.threshold)

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        likely = confidence(proposal, jax.nn.softmax(logits))
        kept = (likely > 0) & (
            self._averages(tree, likely) if self.mean else likely >= self.threshold
        )
        return follow(draw, tree, logits, kept)

    def _averages(self, tree: Tree, likely: Array) -> Array:
        """[N] whether a node lies on a path to a leaf that is possible, and likely enough on average."""
        node = jnp.arange(len(likely))
        path = tree.ancestors
        guesses = path & (node > 0)
        total = jnp.where(guesses, likely, 0).sum(-1)
        leaf = ~(tree.parent[None, :] == node[:, None]).any(-1)
        possible = ((likely > 0) | ~guesses).all(-1)
        whole = leaf & possible & (total >= self.threshold * guesses.sum(-1))
        return (path & whole[:, None]).any(0)
