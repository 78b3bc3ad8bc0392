"""`draft_model`: a smaller language model guesses a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax import sampling, tree
from specjax.proposers.chain import Chain
from specjax.types import Block, Model, Proposal


@struct.dataclass
class DraftState:
    cache: Any
    fresh: Array  # [B, num_drafts + 1] tokens that the target committed and the draft has not read
    count: Array  # [B] how many


@dataclasses.dataclass(frozen=True)
class DraftModel(Chain):
    """`num_drafts` tokens, drawn one after the other from `model`.

    The draft never rolls back: it commits only what the target has committed.  `observe` remembers that block, and the
    first pass of the next `propose` reads it together with the pending token, so a proposal costs `num_drafts` passes.

    The draft may have another (padded) vocabulary size than the target, as long as both mean the same tokens.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1.
    """

    model: Model
    vocab_size: int  # the target's
    num_drafts: int = 4

    def init(self, params: Any, prompt: Block, capacity: int) -> DraftState:
        rows, width = prompt.tokens.shape
        # The look-ahead is staged behind the catch-up block: room for both.
        cache = self.model.init_cache(rows, capacity + 2 * self.num_nodes)
        positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
        cache = self.model.apply(params, prompt.tokens, positions, cache).cache.commit(prompt.count)
        return DraftState(cache, jnp.zeros((rows, self.num_nodes), jnp.int32), jnp.zeros(rows, jnp.int32))

    def observe(self, params: Any, state: DraftState, block: Block) -> DraftState:
        width = min(self.num_nodes, block.tokens.shape[1])
        return dataclasses.replace(
            state, fresh=state.fresh.at[:, :width].set(block.tokens[:, :width]), count=block.count
        )

    def propose(
        self, params: Any, state: DraftState, pending: Array, draw: Any, warp: Callable[[Array], Array]
    ) -> tuple[Proposal, DraftState]:
        rows = jnp.arange(len(pending))
        # Catch up: the tokens committed since, then the pending one, in one pass.
        unread = jnp.pad(state.fresh, ((0, 0), (0, 1))).at[rows, state.count].set(pending)
        committed, logits = self._read(params, state.cache, unread, state.count)
        committed = committed.commit(state.count)

        # Look ahead on a copy of the cache's length: the drafts stay scratch, and the last one is never read.
        def draft(logits, node):
            warped = warp(logits[:, None])[:, 0]
            noise = jax.vmap(lambda d: d.noise(node, node))(draw)
            return sampling.argmax(warped + noise), warped

        cache = committed.commit(jnp.ones_like(state.count))
        tokens, drawn_from = [pending], []
        for node in range(self.num_drafts):
            token, warped = draft(logits, node)
            tokens.append(token)
            drawn_from.append(warped)
            if node + 1 < self.num_drafts:
                cache, logits = self._read(params, cache, token[:, None], jnp.zeros_like(state.count))
                cache = cache.commit(jnp.ones_like(state.count))
        committed = dataclasses.replace(cache, length=committed.length)

        parent = jnp.broadcast_to(tree.chain(self.num_nodes), (len(pending), self.num_nodes))
        # Nothing is drawn below the last node; under shared noise nobody asks what the guesses were drawn from.
        all_logits = None if draw.shared else jnp.stack([*drawn_from, drawn_from[-1]], axis=1)
        proposal = Proposal(jnp.stack(tokens, axis=1), parent, all_logits)
        return proposal, DraftState(committed, state.fresh, jnp.zeros_like(state.count))

    def _read(self, params: Any, cache: Any, tokens: Array, at: Array) -> tuple[Any, Array]:
        """Stage `tokens` [B, T]; the cache, and the logits [B, V] after token `at` [B] on the target's vocabulary."""
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
        out = self.model.apply(params, tokens, positions, cache)
        logits = out.logits[jnp.arange(len(at)), at].astype(jnp.float32)
        extra = self.vocab_size - logits.shape[-1]
        if extra > 0:
            logits = jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf)
        return out.cache, logits[:, : self.vocab_size]
