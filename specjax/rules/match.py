"""`match`: draw the target's token at every node, and follow the child that guessed it."""

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
class Match(Rule):
    """Exact, for any proposal at all: what is emitted is the target's own draw, and a guess only saves the pass.

    The token at absolute position t is argmax(logits + g_t), with Gumbel noise g_t from the row's key and t alone.  So
    the text is the same for every proposer, every number of drafts and every batch, and for no proposer.  A proposer
    that draws its guesses with the same noise agrees with probability at least (1 - TV) / (1 + TV).

    Reference: Daliri, Musco and Suresh 2024, arXiv 2408.07978, theorem 1 and section 4 (Gumbel coupling).
    """

    exact = True
    shared_noise = True

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        num_nodes = proposal.tokens.shape[0]
        noise = draw.noise(jnp.arange(num_nodes), tree.depth)
        wanted = sampling.argmax(logits + noise)

        # Siblings follow their parent in index order, so one pass over the nodes is a correct walk of any tree.
        def visit(node, n):
            follow = (proposal.parent[n] == node) & (proposal.tokens[n] == wanted[node])
            return jnp.where(follow, n, node), None

        node, _ = jax.lax.scan(
            visit, jnp.int32(0), jnp.arange(1, num_nodes, dtype=jnp.int32), unroll=True
        )
        return Verdict(node, wanted[node])
