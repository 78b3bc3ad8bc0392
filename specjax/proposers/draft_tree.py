"""`draft_tree`: a smaller language model guesses a tree of fixed shape."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax import sampling, tree
from specjax.proposers.draft_model import Drafter, DraftState
from specjax.types import Proposal


@dataclasses.dataclass(frozen=True)
class DraftTree(Drafter):
    """Every node of level l has `branching[l]` children: (3, 2, 1) makes levels of 3, 6 and 6 nodes below the root.

    Siblings are the tokens of greatest logit + noise.  Under shared noise those are the best guesses at the target's
    own draw; with noise of the node's own that is drawing without replacement (Gumbel-top-k).  A row of temperature 0
    has runners-up under `match`; under `rejection` its first child has all the mass, and the others count for nothing.

    The draft reads a level in one pass, together with the levels above: a pass sees what it stages itself, and what is
    committed.  So a proposal costs a pass a level, and the last level is never read.

    Reference: Kool et al. 2019, arXiv 1903.06059, section 3 (Gumbel-top-k); Jeon et al. 2024, arXiv 2402.14160.
    """

    branching: tuple[int, ...] = (3, 2, 1)
    is_chain = False
    draws = True

    def __post_init__(self):
        object.__setattr__(self, "branching", tuple(self.branching))  # a list would not be hashable
        if not self.branching or min(self.branching) < 1:
            raise ValueError(f"branching={self.branching}; every level needs at least 1 child a node, as in (3, 2, 1)")
        if max(self.branching) > self.vocab_size:
            raise ValueError(f"branching={self.branching}; siblings are distinct, of {self.vocab_size} tokens")

    @property
    def num_nodes(self) -> int:
        return sum(self._widths)

    @property
    def max_depth(self) -> int:
        return len(self.branching)

    @property
    def parent(self) -> np.ndarray:
        """[N]: level by level, siblings side by side."""
        starts = np.cumsum([0, *self._widths])
        levels = [np.arange(first, end) for first, end in itertools.pairwise(starts)]
        below = [np.repeat(nodes, children) for nodes, children in zip(levels, self.branching, strict=False)]
        return np.concatenate([tree.chain(1), *below]).astype(np.int32)

    @property
    def _widths(self) -> list[int]:
        return [math.prod(self.branching[:level]) for level in range(len(self.branching) + 1)]

    def propose(
        self, params: Any, state: DraftState, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, DraftState]:
        rows, parent = len(pending), jnp.array(self.parent)
        depth, mask = tree.depth(parent), tree.ancestor_mask(parent)
        committed, cache, logits = self._catch_up(params, state, pending)

        tokens, logits, drawn_from = pending[:, None], logits[:, None], []
        for level, (width, children) in enumerate(zip(self._widths, self.branching, strict=False)):
            nodes = jnp.arange(tokens.shape[1] - width, tokens.shape[1])
            if level > 0:
                # All nodes so far but the root, which the cache holds.
                at, seen = jnp.broadcast_to(nodes - 1, (rows, width)), slice(1, tokens.shape[1])
                cache, logits = self._read(params, cache, tokens[:, seen], at, depth[seen] - 1, mask[None, seen, seen])
            path = jax.vmap(tree.path_tokens, (0, None, None))(tokens, parent[: tokens.shape[1]], level)
            warped = warp(logits, path[:, nodes])
            noise = jax.vmap(lambda d, nodes=nodes, level=level: jax.vmap(lambda n: d.noise(n, level))(nodes))(draw)
            _, found = jax.lax.top_k(sampling.scores(logits, warped, noise), children)
            tokens = jnp.concatenate([tokens, found.reshape(rows, -1)], axis=1)
            drawn_from.append(warped)
        # Nothing is drawn below the last level; under shared noise nobody asks what the guesses were drawn from.
        drawn_from.append(jnp.zeros((rows, self._widths[-1], self.vocab_size), jnp.float32))
        all_logits = None if draw.shared else jnp.concatenate(drawn_from, axis=1)
        proposal = Proposal(tokens, jnp.broadcast_to(parent, tokens.shape), all_logits)
        return proposal, DraftState(cache.rewind(committed), state.fresh, jnp.zeros_like(state.count))
