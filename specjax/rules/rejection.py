"""`rejection`: speculative sampling, generalised from a chain to any tree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.types import Proposal, Verdict


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Exact: accept a guess x with probability min(1, p(x) / q(x)), else go on with the residual norm(max(p - q, 0)).

    p is the target's distribution after a node and q the draft's.  Siblings are tried in turn: after a refusal p
    becomes the residual, and q the draft's distribution without the refused token, since siblings are drawn without
    replacement.  A proposal without logits is a point mass: accept with p(x), then take x out of p.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2;
    for siblings without replacement, Jeon et al. 2024, arXiv 2402.14160, section 3.2.
    """

    exact = True
    shared_noise = False

    def __call__(self, draw: sampling.IndependentDraw, proposal: Proposal, logits: Array, max_depth: int) -> Verdict:
        num_nodes = proposal.tokens.shape[0]
        uniform = draw.acceptance(num_nodes)
        target = jax.nn.softmax(logits)
        draft = None if proposal.logits is None else jax.nn.softmax(proposal.logits)

        def visit(carry, n):
            node, residual, remaining = carry
            token = proposal.tokens[n]
            here = proposal.parent[n] == node
            mass = 1.0 if draft is None else remaining[token]
            # A guess of zero draft mass was never drawn; accepting it on u * 0 < p would favour it.
            accept = here & (mass > 0) & (uniform[n] * mass < residual[token])
            refuse = here & ~accept
            if draft is None:
                refused = _normalise(residual.at[token].set(0.0))
            else:
                refused = _normalise(jnp.maximum(residual - remaining, 0.0))
                rest = _normalise(remaining.at[token].set(0.0))
                remaining = jnp.where(accept, draft[n], jnp.where(refuse, rest, remaining))
            residual = jnp.where(accept, target[n], jnp.where(refuse, refused, residual))
            return (jnp.where(accept, n, node), residual, remaining), None

        start = (jnp.int32(0), target[0], jnp.float32(0) if draft is None else draft[0])
        (node, residual, _), _ = jax.lax.scan(visit, start, jnp.arange(1, num_nodes))
        path = tree.path(proposal.parent, node, max_depth)
        next_token = sampling.argmax(jnp.log(residual) + draw.residual())
        return Verdict(path, tree.depth(proposal.parent)[node], next_token)


def _normalise(x: Array) -> Array:
    """x / sum(x).  The sum is zero only where p <= q everywhere, that is p = q up to rounding: then every guess was
    accepted but for an event of that rounding's probability, and p is as good an answer as any."""
    total = x.sum(-1, keepdims=True)
    return x / jnp.where(total > 0, total, 1.0)
