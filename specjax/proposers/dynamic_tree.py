"""`dynamic_tree`: a smaller language model guesses a tree that grows where the draft is sure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax import sampling, tree
from specjax.proposers.draft_model import Drafter, DraftState
from specjax.types import ABSENT, Proposal


@dataclasses.dataclass(frozen=True)
class DynamicTree(Drafter):
    """Expands the `width` most probable nodes of a level by `width` children each, and keeps the best of all.

    A node's value is the product of the draft's probabilities on its path.  Parents are data: every row and step has a
    tree of its own, in one program.

    Under shared noise a probability is a token's share after the noise, which is known to proposer and rule.  Under
    independent draws there is no noise: which nodes are kept depends on their tokens, so they are no draws from any
    distribution, and are proposed as what they are, a deterministic function of the text, that is point masses.

    Reference: Li et al. 2024 (EAGLE-2), arXiv 2406.16858, section 4: expansion and reranking.
    """

    depth: int = 4
    width: int = 4
    num_nodes: int = 16  # kept, the root included
    is_chain = False
    draws = False

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(f"depth={self.depth}; it must be at least 1")
        if not 1 <= self.width <= self.vocab_size:
            raise ValueError(f"width={self.width}; it must lie in [1, {self.vocab_size}], the size of the vocabulary")
        candidates = 1 + self.width + (self.depth - 1) * self.width**2
        if not 2 <= self.num_nodes <= candidates:
            raise ValueError(
                f"num_nodes={self.num_nodes}; depth={self.depth} and width={self.width} make {candidates} candidates, "
                f"the root among them, so it must lie in [2, {candidates}]"
            )

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def _ahead(self) -> int:
        return max((self.depth - 1) * self.width, self.num_nodes)  # those that are expanded, though few may be kept

    def propose(
        self, params: Any, state: DraftState, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, DraftState]:
        rows, width = len(pending), self.width
        committed, cache, logits = self._catch_up(params, state, pending)
        logits, root = logits[:, None], jnp.zeros((rows, 1), jnp.int32)

        # Candidates of all levels, each with its parent among them, and the logarithm of its value.
        tokens, parent, value = pending[:, None], root + ABSENT, jnp.zeros((rows, 1), jnp.float32)
        # Those of them that were expanded, each with its parent among these; the newest are the frontier.
        expanded, above, frontier, new = root, root + ABSENT, root, value
        for level in range(self.depth):
            if level > 0:
                _, best = jax.lax.top_k(new, width)
                above = jnp.concatenate([above, expanded.shape[1] - frontier.shape[1] + best // width], axis=1)
                frontier = tokens.shape[1] - new.shape[1] + best
                expanded = jnp.concatenate([expanded, frontier], axis=1)
                # All expanded nodes but the root, which the cache holds.
                last = jnp.broadcast_to(jnp.arange((level - 1) * width, level * width), (rows, width))
                depth, mask = jnp.repeat(jnp.arange(level), width), jax.vmap(tree.ancestor_mask)(above)[:, 1:, 1:]
                cache, logits = self._read(params, cache, _take(tokens, expanded[:, 1:]), last, depth, mask)
            noise = jax.vmap(lambda d, level=level: d.noise(0, level))(draw)[:, None] if draw.shared else jnp.zeros(())
            paths = jax.vmap(tree.path_tokens, (0, 0, None))(tokens, parent, level)
            warped = warp(logits, jnp.take_along_axis(paths, frontier[..., None], axis=1))
            chance, found = jax.lax.top_k(jax.nn.log_softmax(sampling.scores(logits, warped, noise)), width)
            new = (_take(value, frontier)[..., None] + chance).reshape(rows, -1)
            tokens = jnp.concatenate([tokens, found.reshape(rows, -1)], axis=1)
            parent = jnp.concatenate([parent, jnp.repeat(frontier, width, axis=1)], axis=1)
            value = jnp.concatenate([value, new], axis=1)

        # A parent is worth no less than its child and stands before it, so the best of all are a tree.
        _, kept = jax.lax.top_k(value, self.num_nodes)
        kept = jnp.sort(kept, axis=1)
        place = jax.vmap(jnp.searchsorted)(kept, _take(parent, kept)).astype(jnp.int32)
        proposal = Proposal(_take(tokens, kept), place.at[:, 0].set(ABSENT), None)
        return proposal, DraftState(cache.rewind(committed), state.fresh, jnp.zeros_like(state.count))


def _take(x: Array, index: Array) -> Array:
    return jnp.take_along_axis(x, index, axis=1)
