"""`typical`: keep what is not surprising, measured by the target's entropy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import entr

from specjax import sampling
from specjax.rules.confidence import check_fraction, confidence, follow
from specjax.types import Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class Typical:
    """Inexact: keeps a guess x while p(x) > min(posterior_threshold, posterior_alpha exp(-H(p))).

    p is the target's warped distribution after the guess's parent, and H(p) its entropy in nats: where many tokens
    would do, an unlikely one is good enough.  Of a tree the longest path is kept.  Numbers are structure here:
    another threshold is another program.

    Reference: Cai et al. 2024, "Medusa", arXiv 2401.10774, section 2.3.1.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    exact = False
    shared_noise = True

    def __post_init__(self):
        check_fraction(posterior_threshold=self.posterior_threshold, posterior_alpha=self.posterior_alpha)

    def __call__(self, draw: sampling.SharedDraw, proposal: Proposal, logits: Array, max_depth: int) -> Verdict:
        probs = jax.nn.softmax(logits)
        least = jnp.minimum(self.posterior_threshold, self.posterior_alpha * jnp.exp(-entr(probs).sum(-1)))
        kept = confidence(proposal, probs) > least[jnp.maximum(proposal.parent, 0)]
        return follow(draw, proposal, logits, kept, max_depth)
