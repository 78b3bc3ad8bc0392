"""`rejection`: speculative sampling, generalised from a chain to any tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling
from specjax.contract import Draw, Rule
from specjax.tree import Tree
from specjax.types import Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class Rejection(Rule):
    """An exact rule that accepts a draft x with probability min(1, p(x) / q(x)).

    p is the target's distribution after a node, q the draft's, and norm(max(p - q, 0)) the
    residual.  Siblings are tried in turn: after a rejection p becomes the residual, and q becomes
    the draft's distribution without the rejected token, since siblings are drawn without
    replacement.  Drafts of a proposal without logits are point masses: x is accepted with
    probability p(x), else its mass is removed from p.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv
    2302.01318, algorithm 2; for siblings without replacement, Jeon et al. 2024, arXiv 2402.14160,
    section 3.2.

    Example:
      >>> specjax.generate(target, prompt, draft=draft, rule=Rejection(), temperature=0.8)
    """

    exact = True
    shared_noise = False
    wants_logits = True

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        draft = draft_probabilities(proposal)
        uniform = draw.acceptance(proposal.tokens.shape[0])
        node, residual, _ = walk(uniform, proposal, jax.nn.softmax(logits), draft)
        next_token = sampling.argmax(jnp.log(residual) + draw.residual())
        return Verdict(node, next_token)


def draft_probabilities(proposal: Proposal) -> Array | None:
    """Returns [N, V] the distributions that children were drawn from; None for point masses.

    Raises:
      ValueError: the drafts were drawn, and the proposal has no logits.
    """
    if proposal.point_mass:
        return None
    if proposal.logits is None:
        raise ValueError(
            "the proposal has no logits, and this rule needs the distributions that drafts were "
            "drawn from: fill Proposal.logits if context.wants_logits, or set point_mass=True "
            "if nothing was drawn"
        )
    return jax.nn.softmax(proposal.logits)


def walk(
    uniform: Array, proposal: Proposal, target: Array, draft: Array | None
) -> tuple[Array, Array, Array]:
    """Walks down one row's tree in one pass over nodes: children come after their parent.

    Args:
      uniform: [N] acceptance draws.
      proposal: of one row.
      target, draft: [N, V] probabilities after each node; `draft` None for point masses.

    Returns:
      The last accepted node [], the distribution of the next token [V], and the probability [N]
      with which each node was accepted when it was tried (1 for nodes that were not tried).
    """

    def visit(
        carry: tuple[Array, Array, Array], n: Array
    ) -> tuple[tuple[Array, Array, Array], Array]:
        node, residual, remaining = carry
        token = proposal.tokens[n]
        # Siblings beyond the tokens that could be drawn are a function of the text.
        fixed = jnp.bool_(True) if draft is None else remaining.max() <= 0
        mass = jnp.where(fixed, 1, remaining[token]).astype(residual.dtype)
        # A draft with q(x) = 0 cannot have been drawn, and u * q < p would always accept it.
        here = (proposal.parent[n] == node) & (mass > 0)
        accept = here & (uniform[n] * mass < residual[token])
        reject = here & ~accept
        chance = jnp.where(here, jnp.minimum(1, residual[token] / jnp.where(here, mass, 1)), 1)
        rejected = _normalise(residual.at[token].set(0), residual)
        if draft is not None:
            drawn = _normalise(jnp.maximum(residual - remaining, 0), residual)
            rejected = jnp.where(fixed, rejected, drawn)
            rest = remaining.at[token].set(0)
            remaining = jnp.where(
                accept, draft[n], jnp.where(reject, _normalise(rest, rest), remaining)
            )
        residual = jnp.where(accept, target[n], jnp.where(reject, rejected, residual))
        return (jnp.where(accept, n, node), residual, remaining), chance

    start = (jnp.int32(0), target[0], target[0] if draft is None else draft[0])
    (node, residual, _), chance = jax.lax.scan(
        visit, start, jnp.arange(1, len(uniform), dtype=jnp.int32)
    )
    chance = jnp.concatenate([jnp.ones_like(uniform[:1]), chance.astype(uniform.dtype)])
    return node, residual, chance


def _normalise(x: Array, otherwise: Array) -> Array:
    """Returns x / sum(x), or `otherwise` if x is zero.

    A residual is zero only if p = q up to rounding.  A rejection then comes only from rounding,
    and p itself is the right distribution.
    """
    total = x.sum()
    return jnp.where(total > 0, x / jnp.where(total > 0, total, 1), otherwise)
