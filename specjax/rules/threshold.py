"""`threshold`: accept drafts that are likely enough under the target."""

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
    """Inexact: accepts a draft while its probability under the target is at least `threshold`.

    With `mean` a path is accepted as a whole: a chain, or a path from the root of a tree to a leaf,
    whose probabilities are at least `threshold` on average.  Either way the longest path counts.

    At 0 every possible draft is accepted; at 1 only certain ones are, and the text is that of plain
    decoding.  The threshold is data: another one does not recompile.
    """

    threshold: float = 0.3
    mean: bool = struct.field(pytree_node=False, default=False)

    exact = False
    shared_noise = True

    def __post_init__(self) -> None:
        check_fraction(threshold=self.threshold)

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        likely = confidence(proposal, jax.nn.softmax(logits))
        enough = self._averages(tree, likely) if self.mean else likely >= self.threshold
        return follow(draw, tree, logits, (likely > 0) & enough)

    def _averages(self, tree: Tree, likely: Array) -> Array:
        """[N] bool: is a node on a path to a leaf that is possible and likely enough on average?"""
        node = jnp.arange(len(likely))
        path = tree.ancestors
        drafts = path & (node > 0)
        total = jnp.where(drafts, likely, 0).sum(-1)
        leaf = ~(tree.parent[None, :] == node[:, None]).any(-1)
        possible = ((likely > 0) | ~drafts).all(-1)
        whole = leaf & possible & (total >= self.threshold * drafts.sum(-1))
        return (path & whole[:, None]).any(0)
