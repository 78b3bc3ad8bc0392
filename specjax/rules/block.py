"""`block`: accept the longest prefix of a chain, judged as a block."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.contract import Draw, Rule
from specjax.rules.rejection import draft_probabilities
from specjax.tree import Tree
from specjax.types import Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class BlockVerification(Rule):
    """An exact rule for chains; no exact rule accepts more tokens in one step on average.

    `rejection` judges each draft by itself and stops at the first rejection.  Here likely drafts
    can compensate for an unlikely one after them: a prefix has a weight w, and a draft x changes it
    to min(1, w p(x) / q(x)).  Each prefix is accepted or rejected with a uniform draw of its own,
    and the longest accepted prefix is kept.  The next token is drawn from norm(max(w p - q, 0)), or
    from p after the whole chain.  A proposal without logits is a chain of point masses.

    Reference: Sun et al. 2024, arXiv 2403.10444, algorithm 2 and equation 4.

    Example:
      >>> specjax.generate(target, prompt, draft=draft, rule=BlockVerification(), temperature=0.8)
    """

    exact = True
    shared_noise = False
    wants_logits = True
    chain_only = True

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        num_nodes = proposal.tokens.shape[0]
        draft = draft_probabilities(proposal)
        chance, residual = weigh(proposal, jax.nn.softmax(logits), draft)
        accepted = draw.acceptance(num_nodes) < chance
        node = jnp.max(jnp.where(accepted, jnp.arange(num_nodes, dtype=jnp.int32), 0))
        next_token = sampling.argmax(jnp.log(residual[node]) + draw.residual())
        return Verdict(node, next_token)


def weigh(proposal: Proposal, target: Array, draft: Array | None) -> tuple[Array, Array]:
    """Computes the acceptance probability and the residual of each prefix of one row's chain.

    Args:
      proposal: of one row; the chain ends before its first absent node.
      target, draft: [N, V] probabilities after each node; `draft` None for point masses.

    Returns:
      The probability [N] that the prefix ending at each node is accepted (0 after the end of the
      chain; the root's value is not used), and the unnormalised distribution [N, V] of the next
      token after that prefix.
    """
    num_nodes, size = target.shape
    node = jnp.arange(num_nodes)
    drafted = jnp.roll(proposal.tokens, -1)  # the draft after each node
    draft = jax.nn.one_hot(drafted, size, dtype=target.dtype) if draft is None else draft
    mass = draft[node, drafted]
    # A draft with q(x) = 0 cannot have been drawn: it counts as absent.
    drawn = (jnp.roll(proposal.parent, -1) == node) & (node < num_nodes - 1) & (mass > 0)
    ratio = jnp.where(drawn, target[node, drafted] / jnp.where(drawn, mass, 1), 0)

    def extend(weight: Array, ratio: Array) -> tuple[Array, Array]:
        return jnp.minimum(1, weight * ratio), weight

    _, weight = jax.lax.scan(extend, jnp.ones_like(ratio[0]), ratio)
    # No draft follows the last node, so its q is 0 and its residual is p.
    residual = jnp.maximum(weight[:, None] * target - jnp.where(drawn[:, None], draft, 0), 0)
    total = residual.sum(-1)
    # 0 / 0 means weight 1 and p = q: the prefix is accepted, and so is the next longer one.
    both = total + (1 - weight)
    chance = jnp.where(both > 0, total / jnp.where(both > 0, both, 1), 1)
    return chance, jnp.where(total[:, None] > 0, residual, target)
