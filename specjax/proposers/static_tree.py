"""`StaticTree`: a tree of fixed shape, from any source."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling, tree
from specjax.contract import Context
from specjax.proposers.shape import Shape
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class StaticTree(Shape):
    """Every node of level l has `branching[l]` children: (3, 2, 1) makes levels of 3, 6 and 6 nodes.

    Siblings are the tokens of greatest logit + noise.  Under shared noise those are the best guesses
    at the target's own draw; with noise of the node's own that is drawing without replacement
    (Gumbel-top-k).  A row of temperature 0 has runners-up under `match`; under `rejection` its first
    child has all the mass, and the others count for nothing.

    The source reads a level in one pass, together with the levels above: a pass sees what it stages
    itself, and what is committed.  So a proposal costs a pass a level, and the last level is never
    read.

    Reference: Kool et al. 2019, arXiv 1903.06059, section 3 (Gumbel-top-k); Jeon et al. 2024,
    arXiv 2402.14160.
    """

    branching: tuple[int, ...] = (3, 2, 1)
    is_chain = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "branching", tuple(self.branching))  # a list would not be hashable
        if not self.branching or min(self.branching) < 1:
            raise ValueError(
                f"branching={self.branching}; every level needs at least 1 child a node, as in (3, 2, 1)"
            )
        size = self.source.vocab_size
        if max(self.branching) > size:
            raise ValueError(f"branching={self.branching}; siblings are distinct, of {size} tokens")
        nodes = sum(self._widths)
        self.arrange(nodes, len(self.branching), nodes)

    @property
    def parent(self) -> np.ndarray:
        """[N]: level by level, siblings side by side."""
        starts = np.cumsum([0, *self._widths])
        levels = [np.arange(first, end) for first, end in itertools.pairwise(starts)]
        below = [
            np.repeat(nodes, children)
            for nodes, children in zip(levels, self.branching, strict=False)
        ]
        return np.concatenate([tree.chain(1), *below]).astype(np.int32)

    @property
    def _widths(self) -> list[int]:
        return [math.prod(self.branching[:level]) for level in range(len(self.branching) + 1)]

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Proposal, Any]:
        rows, parent = len(context.pending), jnp.array(self.parent)
        depth, mask = tree.depth(parent), tree.ancestor_mask(parent)
        state, reading, logits = self.source.begin(params, state, context)

        tokens, logits, drawn_from = context.pending[:, None], logits[:, None], []
        for level, (width, children) in enumerate(zip(self._widths, self.branching, strict=False)):
            nodes = jnp.arange(tokens.shape[1] - width, tokens.shape[1])
            if level > 0:
                # All nodes so far but the root, which the reading holds.
                at, seen = jnp.broadcast_to(nodes - 1, (rows, width)), slice(1, tokens.shape[1])
                reading, logits = self.source.read_tree(
                    params, reading, tokens[:, seen], at, depth[seen] - 1, mask[None, seen, seen]
                )
            path = jax.vmap(tree.path_tokens, (0, None, None))(
                tokens, parent[: tokens.shape[1]], level
            )
            warped = context.warp(logits, path[:, nodes])
            noise = context.noise(nodes, jnp.full(width, level))
            _, best = jax.lax.top_k(sampling.scores(logits, warped, noise), children)
            tokens = jnp.concatenate([tokens, best.reshape(rows, -1)], axis=1)
            drawn_from.append(warped)
        parents = jnp.broadcast_to(parent, tokens.shape)
        known = self.source.known(params, reading, tokens)
        if known is not None:
            parents = jax.vmap(tree.prune)(parents, known)
        all_logits = None
        if context.wants_logits:
            # Nothing is drawn below the last level.
            drawn_from.append(jnp.zeros((rows, self._widths[-1], logits.shape[-1]), jnp.float32))
            all_logits = jnp.concatenate(drawn_from, axis=1)
        proposal = Proposal(tokens, parents, all_logits)
        return proposal, self.source.end(params, state, reading, proposal)
