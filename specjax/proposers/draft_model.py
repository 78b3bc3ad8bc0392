"""`draft_model`: a smaller language model guesses a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.prefill import read_prompt
from specjax.proposers.chain import CatchUp, ModelChain
from specjax.types import Block, Model, Proposal


@struct.dataclass
class DraftState:
    cache: Any
    fresh: Array  # [B, max_depth + 1] tokens that the target committed and the draft has not read
    count: Array  # [B] how many


@dataclasses.dataclass(frozen=True)
class Drafter(CatchUp):
    """What chains and trees from a smaller model share: its cache, and reading.

    It commits only what the target has committed, and takes its own guesses back.  `observe` remembers the block, and
    the first pass of the next `propose` reads it together with the pending token.

    The draft may have another (padded) vocabulary size than the target, as long as both mean the same tokens.
    """

    model: Model
    vocab_size: int  # the target's

    def init(self: Any, params: Any, prompt: Block, capacity: int) -> DraftState:
        rows, block = len(prompt.tokens), self.max_depth + 1
        # The look-ahead is staged behind the catch-up block: room for both.
        cache = self.model.init_cache(rows, capacity + block + self.num_nodes)
        _, cache = read_prompt(self.model, params, prompt.tokens, prompt.count, cache)
        return DraftState(cache, jnp.zeros((rows, block), jnp.int32), jnp.zeros(rows, jnp.int32))

    def _catch_up(self, params: Any, state: DraftState, pending: Array) -> tuple[Any, Any, Array]:
        """Read the tokens committed since, then the pending one, in one pass.

        Returns:
          The cache with the former, the cache with both, and the logits [B, V] after the pending token.
        """
        staged, logits = self._read(params, state.cache, self._unread(state, pending), state.count[:, None])
        return staged.commit(state.count), staged.commit(state.count + 1), logits[:, 0]

    def _read(
        self, params: Any, cache: Any, tokens: Array, at: Array, depth: Any = None, mask: Array | None = None
    ) -> tuple[Any, Array]:
        """Stage `tokens` [B, T]: a chain, or nodes of `depth` [T] behind the text that see each other as `mask` says.

        Returns:
          The cache, and the logits [B, M, V] after the tokens `at` [B, M], on the target's vocabulary.
        """
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        positions = cache.length[:, None] + (jnp.arange(tokens.shape[1]) if depth is None else depth)
        out = self.model.apply(params, tokens, positions, cache, mask)
        logits = jnp.take_along_axis(out.logits, at[..., None], axis=1).astype(jnp.float32)
        extra = self.vocab_size - logits.shape[-1]
        if extra > 0:
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, extra)), constant_values=-jnp.inf)
        return out.cache, logits[..., : self.vocab_size]


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelChain, Drafter):
    """`num_drafts` tokens, drawn one after the other from `model`, at a pass each.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1.
    """

    num_drafts: int = 4
    confidence_threshold: float = 0.0

    def propose(
        self, params: Any, state: DraftState, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, DraftState]:
        committed, cache, logits = self._catch_up(params, state, pending)
        one, none = jnp.ones_like(state.count), jnp.zeros_like(state.count)

        def read(cache, tokens):
            cache, logits = self._read(params, cache, tokens[:, None], none[:, None])
            return cache.commit(one), logits[:, 0]

        # Look ahead, and take it back afterwards: the drafts stay scratch, and the last one is never read.
        proposal, cache = self._look_ahead(read, cache, logits, pending, draw, warp)
        return proposal, DraftState(cache.rewind(committed), state.fresh, none)
