"""`draft_model`: a smaller language model guesses a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import empty_cache, read_prompt
from specjax.proposers.chain import CatchUp, ModelChain
from specjax.types import ABSENT, Block, Model, Proposal


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
        cache = empty_cache(self.model, rows, capacity, block + self._ahead)
        _, cache = read_prompt(self.model, params, prompt.tokens, prompt.count, cache)
        return DraftState(cache, jnp.zeros((rows, block), jnp.int32), jnp.zeros(rows, jnp.int32))

    @property
    def _ahead(self: Any) -> int:
        """The most tokens behind the pending one that are in the cache at a time."""
        return self.num_nodes

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


@struct.dataclass
class ChainState(DraftState):
    ahead: Array  # [B, num_drafts] the pending token and the guesses: scratch in the cache, or ABSENT where not read


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelChain, Drafter):
    """`num_drafts` tokens, drawn one after the other from `model`, at a pass each.

    What it guessed right it need not read again, if its cache keeps scratch: two tokens are left at most, the last
    guess and the pending one.

    Reference: Leviathan et al. 2022, arXiv 2211.17192, algorithm 1.
    """

    num_drafts: int = 4
    confidence_threshold: float = 0.0

    def init(self, params: Any, prompt: Block, capacity: int) -> ChainState:
        begun = super().init(params, prompt, capacity)
        ahead = jnp.zeros((len(begun.count), self.num_drafts), jnp.int32)
        return ChainState(begun.cache, begun.fresh, begun.count, ahead)

    def propose(
        self, params: Any, state: ChainState, pending: Array, draw: Any, warp: Callable[..., Array]
    ) -> tuple[Proposal, ChainState]:
        unread = self._read_most(params, state) if _keeps_scratch(state.cache) else state
        committed, cache, logits = self._catch_up(params, unread, pending)
        one, none = jnp.ones_like(state.count), jnp.zeros_like(state.count)

        def read(cache, tokens):
            cache, logits = self._read(params, cache, tokens[:, None], none[:, None])
            return cache.commit(one), logits[:, 0]

        # Look ahead, and take it back afterwards: the drafts stay scratch, and the last one is never read.
        proposal, cache = self._look_ahead(read, cache, logits, pending, draw, warp)
        # Read is what another guess hangs below, in any row: where a chain stops, passes may be spared.
        read_on = (proposal.parent[:, 1:] != ABSENT).any(0)
        ahead = jnp.where(read_on, proposal.tokens[:, :-1], ABSENT)
        return proposal, ChainState(cache.rewind(committed), state.fresh, none, ahead)

    def observe(self, params: Any, state: ChainState, block: Block) -> ChainState:
        state = super().observe(params, state, block)
        if not _keeps_scratch(state.cache):
            return state
        right = (state.fresh[:, :-1] == state.ahead) & (jnp.arange(self.num_drafts) < state.count[:, None])
        known = jnp.cumprod(right, axis=1, dtype=jnp.int32).sum(1, dtype=jnp.int32)
        fresh = jax.vmap(jnp.roll)(state.fresh, -known)
        return ChainState(state.cache.commit(known), fresh, state.count - known, state.ahead)

    def _read_most(self, params: Any, state: ChainState) -> ChainState:
        """With one fresh token a row at most: a pass reads those before it where the guesses were another's."""

        def read(state):
            most = jnp.maximum(state.count - 1, 0)
            cache, _ = self._read(params, state.cache, state.fresh, most[:, None])
            fresh = jax.vmap(jnp.roll)(state.fresh, -most)
            return ChainState(cache.commit(most), fresh, state.count - most, state.ahead)

        # A loop of no turn or one: what a branch returns would be copied, what a loop carries stays in place.
        state = jax.lax.while_loop(lambda state: (state.count > 1).any(), read, state)
        return dataclasses.replace(state, fresh=state.fresh[:, :1])


def _keeps_scratch(cache: Any) -> bool:
    return getattr(cache, "keeps_scratch", False)
