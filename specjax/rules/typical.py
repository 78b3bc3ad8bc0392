"""`typical`: accept drafts that are not surprising, given the entropy of the target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.scipy.special import entr

from specjax.contract import Draw, Rule
from specjax.rules.confidence import check_fraction, confidence, follow
from specjax.tree import Tree
from specjax.types import Proposal, Verdict


@struct.dataclass
class Typical(Rule):
    """An inexact rule: accepts x if p(x) > min(posterior_threshold, posterior_alpha exp(-H(p))).

    p is the target's warped distribution after the draft's parent, and H(p) its entropy in nats: if
    many tokens are plausible, an unlikely one is accepted too.  In a tree the longest path is kept.
    Both thresholds are traced, so new values do not recompile.

    Reference: Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.3.1.

    Example:
      >>> specjax.generate(target, prompt, draft=draft, rule=Typical(0.09, 0.3))
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    exact = False
    shared_noise = True

    def __post_init__(self) -> None:
        check_fraction(
            posterior_threshold=self.posterior_threshold, posterior_alpha=self.posterior_alpha
        )

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        probs = jax.nn.softmax(logits)
        least = jnp.minimum(
            self.posterior_threshold, self.posterior_alpha * jnp.exp(-entr(probs).sum(-1))
        )
        kept = confidence(proposal, probs) > least[jnp.maximum(proposal.parent, 0)]
        return follow(draw, tree, logits, kept)
