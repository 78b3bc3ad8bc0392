"""`match`: draw the target's token at every node, and accept the child that equals it."""

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
    """An exact rule for any proposal: every emitted token is the target's own draw.

    The token at absolute position t is argmax(logits + g_t); the Gumbel noise g_t depends only on
    the row's key and t.  So the text is that of plain decoding, with every proposer, number of
    drafts and batch.  A proposer that draws with the same noise drafts the target's token with a
    probability of at least (1 - TV) / (1 + TV), where TV is the total variation between their
    distributions.

    Reference: Daliri, Musco and Suresh 2024, arXiv 2408.07978, theorem 1 and section 4
    (Gumbel coupling).

    Example:
      >>> specjax.generate(target, prompt, draft=draft, rule=Match())
    """

    exact = True
    shared_noise = True
    by_node = True

    def __call__(self, draw: Draw, proposal: Proposal, tree: Tree, logits: Array) -> Verdict:
        num_nodes = proposal.tokens.shape[0]
        noise = draw.noise(jnp.arange(num_nodes), tree.depth)
        return self.walk(proposal, sampling.argmax(logits + noise))

    def walk(self, proposal: Proposal, wanted: Array) -> Verdict:
        # Children come after their parent, so one pass over the nodes walks down any tree.
        def visit(node: Array, n: Array) -> tuple[Array, None]:
            follow = (proposal.parent[n] == node) & (proposal.tokens[n] == wanted[node])
            return jnp.where(follow, n, node), None

        node, _ = jax.lax.scan(
            visit, jnp.int32(0), jnp.arange(1, len(wanted), dtype=jnp.int32), unroll=True
        )
        return Verdict(node, wanted[node])
