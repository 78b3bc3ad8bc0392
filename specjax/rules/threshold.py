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
    """An inexact rule: accepts drafts whose target probability is at least `threshold`.

    With `mean`, a path from the root to a leaf (on a chain: the whole chain) is accepted or
    rejected as a whole.  It is accepted if the mean of its drafts' probabilities is at least
    `threshold`.  In both modes the longest path is kept.

    At 0 every draft with p > 0 is accepted.  At 1 only drafts with p = 1 are, so the text is that
    of plain decoding.  The threshold is traced, so a new value does not recompile.

    Example:
      >>> specjax.generate(target, prompt, draft=draft, rule=Threshold(0.3))
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
        """Returns [N] bool: True for a node on an accepted path to a leaf.

        Such a path has no draft with p = 0, and a mean probability of at least the threshold.
        """
        node = jnp.arange(len(likely))
        path = tree.ancestors
        drafts = path & (node > 0)
        total = jnp.where(drafts, likely, 0).sum(-1)
        leaf = ~(tree.parent[None, :] == node[:, None]).any(-1)
        possible = ((likely > 0) | ~drafts).all(-1)
        accepted = leaf & possible & (total >= self.threshold * drafts.sum(-1))
        return (path & accepted[:, None]).any(0)
