"""`block`: a chain is accepted or refused as a whole, by the longest prefix that can be kept."""

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
    """Exact, on a chain: in one step no exact rule accepts more tokens on average.

    `rejection` stops at the first refusal; here a guess that the target likes less than the draft did can be made good
    by those before it, since the prefix has one weight w, of which a guess x leaves min(1, w p(x) / q(x)).  The longest
    prefix that its own draw keeps is accepted, and the next token comes from norm(max(w p - q, 0)), after the whole
    chain from p.  A proposal without logits is a chain of point masses.

    Reference: Sun et al. 2024, arXiv 2403.10444, algorithm 2 and equation 4.
    """

    exact = True
    shared_noise = False
    wants_logits = True
    chain_only = True

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        num_nodes = proposal.tokens.shape[0]
        draft = draft_probabilities(proposal)
        chance, residual = weigh(proposal, jax.nn.softmax(logits), draft)
        kept = draw.acceptance(num_nodes) < chance
        node = jnp.max(jnp.where(kept, jnp.arange(num_nodes, dtype=jnp.int32), 0))
        next_token = sampling.argmax(jnp.log(residual[node]) + draw.residual())
        return Verdict(node, next_token)


def weigh(proposal: Proposal, target: Array, draft: Array | None) -> tuple[Array, Array]:
    """What becomes of each prefix of one row's chain.

    Args:
      proposal: of one row; the chain ends before its first absent node.
      target, draft: [N, V] probabilities after each node; `draft` None for point masses.

    Returns:
      The chance [N] that the draw of each node keeps the prefix that ends there (0 behind the end; at the root it is
      of no account), and [N, V] what the next token is drawn from if the text goes on there, up to a factor.
    """
    num_nodes, size = target.shape
    node = jnp.arange(num_nodes)
    guess = jnp.roll(proposal.tokens, -1)  # after each node
    draft = jax.nn.one_hot(guess, size, dtype=target.dtype) if draft is None else draft
    mass = draft[node, guess]
    # A guess of zero draft mass was never drawn: it counts as absent.
    drawn = (jnp.roll(proposal.parent, -1) == node) & (node < num_nodes - 1) & (mass > 0)
    ratio = jnp.where(drawn, target[node, guess] / jnp.where(drawn, mass, 1), 0)

    def extend(weight, ratio):
        return jnp.minimum(1, weight * ratio), weight

    _, weight = jax.lax.scan(extend, jnp.ones_like(ratio[0]), ratio)
    # With nothing of the draft behind it, the last node keeps its whole chain with its weight, and leaves p.
    residual = jnp.maximum(weight[:, None] * target - jnp.where(drawn[:, None], draft, 0), 0)
    total = residual.sum(-1)
    # 0 / 0 is a prefix of weight 1 before p <= q, that is p = q: it is kept, and a longer one will be.
    refused = 1 - weight
    chance = jnp.where(
        total + refused > 0, total / jnp.where(total + refused > 0, total + refused, 1), 1
    )
    return chance, jnp.where(total[:, None] > 0, residual, target)
