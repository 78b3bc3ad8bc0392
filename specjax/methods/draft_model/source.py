"""`DraftSource`: a smaller language model with the target's tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.control_flow import apply_if
from specjax._internal.platforms import prefers_one_pass
from specjax._internal.prefix_sums import leading
from specjax.caches import empty_cache, read_prompt
from specjax.contract import (
    ArrayTree,
    Cache,
    CacheT,
    Context,
    Loaded,
    Lookahead,
    Model,
    ParamsT,
    Source,
)
from specjax.models import on_target
from specjax.proposers import AT_ONCE, Chain, StaticTree, remember, then_pending
from specjax.types import ABSENT, Block, Proposal


@struct.dataclass
class DraftState:
    cache: Cache
    fresh: Array  # [B, depth + 1] tokens that the target committed and the draft has not read
    count: Array  # [B] the number of those tokens
    # [B, depth] the drafts that the last chain read, padded with ABSENT; None: no reuse
    ahead: Array | None


@dataclasses.dataclass(frozen=True)
class DraftSource(Source[ArrayTree, DraftState, Cache]):
    """A draft model that reads the committed tokens, and removes its drafts from its KV cache.

    `observe` stores the committed tokens, and the next `begin` reads them in one pass with the
    pending token.

    If the cache keeps scratch, accepted drafts of a chain are not read again.  Then at most two
    tokens are left to read: the last draft and the pending token.

    The draft's vocabulary may be padded to another size than the target's, as long as equal ids
    mean equal tokens.
    """

    model: Model
    vocab_size: int  # the target's
    asks_draft = True

    def __post_init__(self) -> None:
        # The cache of a model that reads no trees may change its shape with the width of a pass.
        self.declare(resumes=self.model.reads_trees)

    def bind(self, target: Loaded, draft: Loaded | None) -> ArrayTree:
        if draft is None:
            raise ValueError(
                "a proposer over a draft model comes without its weights: "
                "pass the loaded model as draft="
            )
        if self.model != draft.model or self.vocab_size != target.model.vocab_size:
            raise ValueError(
                f"the proposer was made for other models than {draft.name} and {target.name}: "
                "make it from draft.model and target.model.vocab_size"
            )
        return draft.params

    def init(
        self, params: ArrayTree, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> DraftState:
        rows, width = len(prompt.tokens), lookahead.depth + 1
        # Drafts are staged after the committed tokens that are still unread, so both need room.
        cache = empty_cache(self.model, rows, capacity, width + lookahead.staged)
        reuses = lookahead.is_chain and cache.keeps_scratch
        ahead = jnp.zeros((rows, lookahead.depth), jnp.int32) if reuses else None
        return DraftState(
            cache, jnp.zeros((rows, width), jnp.int32), jnp.zeros(rows, jnp.int32), ahead
        )

    def read(self, params: ArrayTree, state: DraftState, block: Block) -> DraftState:
        cache = read_prompt(self.model, params, block.tokens, block.count, state.cache)[-1]
        return dataclasses.replace(state, cache=cache)

    def truncate(self, state: DraftState, count: Array, last: Array | None) -> DraftState | None:
        cache = state.cache.truncate(count)
        if cache is None:
            return None
        rested = self.rest(state)
        return dataclasses.replace(rested, cache=cache, count=jnp.zeros_like(state.count))

    def catch_up(self, params: ArrayTree, state: DraftState) -> DraftState:
        last = jnp.maximum(state.count - 1, 0)[:, None]
        cache, _ = self._read(params, state.cache, state.fresh, last)
        cache = cache.commit(state.count)
        rested = self.rest(state)
        return dataclasses.replace(rested, cache=cache, count=jnp.zeros_like(state.count))

    def begin(
        self, params: ArrayTree, state: DraftState, context: Context
    ) -> tuple[DraftState, Cache, Array]:
        apart = state.ahead is not None and not prefers_one_pass()
        unread = self._read_most(params, state) if apart else state
        tokens = then_pending(unread.fresh, unread.count, context.pending)
        staged, logits = self._read(params, unread.cache, tokens, unread.count[:, None])
        caught_up = dataclasses.replace(
            state, cache=staged.commit(unread.count), count=jnp.zeros_like(state.count)
        )
        return caught_up, staged.commit(unread.count + 1), logits[:, 0]

    def extend(self, params: ArrayTree, reading: Cache, tokens: Array) -> tuple[Cache, Array]:
        cache, logits = self._read(
            params, reading, tokens[:, None], jnp.zeros_like(tokens)[:, None]
        )
        return cache.commit(jnp.ones_like(tokens)), logits[:, 0]

    def read_tree(
        self, params: ArrayTree, reading: Cache, tokens: Array, at: Array, depth: Array, mask: Array
    ) -> tuple[Cache, Array]:
        return self._read(params, reading, tokens, at, depth, mask)

    def end(
        self, params: ArrayTree, state: DraftState, reading: Cache, proposal: Proposal
    ) -> DraftState:
        state = dataclasses.replace(state, cache=reading.rewind(state.cache))
        if state.ahead is None:
            return state
        # A draft was read if some row has a draft after it: a chain skips a pass that no row needs.
        was_read = (proposal.parent[:, 1:] != ABSENT).any(0)
        return dataclasses.replace(
            state, ahead=jnp.where(was_read, proposal.tokens[:, :-1], ABSENT)
        )

    def observe(self, params: ArrayTree, state: DraftState, block: Block) -> DraftState:
        fresh, count = remember(state.fresh, block)
        state = dataclasses.replace(state, fresh=fresh, count=count)
        if state.ahead is None:
            return state
        depth = state.ahead.shape[1]
        accepted = (fresh[:, :-1] == state.ahead) & (jnp.arange(depth) < count[:, None])
        known = leading(accepted).sum(1, dtype=jnp.int32)
        fresh = jax.vmap(jnp.roll)(fresh, -known)
        return DraftState(state.cache.commit(known), fresh, count - known, state.ahead)

    def rest(self, state: DraftState) -> DraftState:
        if state.ahead is None:
            return state
        return dataclasses.replace(state, ahead=jnp.full_like(state.ahead, ABSENT))

    def resume(
        self, params: ArrayTree, state: DraftState, text: Array, length: Array, wanted: Array
    ) -> DraftState:
        # `fresh` has the tokens of the last step only; those before it come from the text.
        width = AT_ONCE * state.fresh.shape[1]
        text = jnp.pad(text, ((0, 0), (0, width)))
        end = jnp.where(wanted, length - state.count, 0)

        def read(cache: Cache) -> Cache:
            tokens = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))(
                text, cache.length
            )
            cache, _ = self._read(params, cache, tokens, jnp.zeros_like(length)[:, None])
            return cache.commit(jnp.clip(end - cache.length, 0, width))

        cache = jax.lax.while_loop(lambda cache: (cache.length < end).any(), read, state.cache)
        return dataclasses.replace(state, cache=cache)

    def _read_most(self, params: ArrayTree, state: DraftState) -> DraftState:
        """Reads all unread tokens but the last, if any row has more than one."""

        def read(state: DraftState) -> DraftState:
            most = jnp.maximum(state.count - 1, 0)
            cache, _ = self._read(params, state.cache, state.fresh, most[:, None])
            fresh = jax.vmap(jnp.roll)(state.fresh, -most)
            return DraftState(cache.commit(most), fresh, state.count - most, state.ahead)

        state = apply_if((state.count > 1).any(), read, state)
        return dataclasses.replace(state, fresh=state.fresh[:, :1])

    def _read(
        self,
        params: ArrayTree,
        cache: Cache,
        tokens: Array,
        at: Array,
        depth: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Cache, Array]:
        tokens = jnp.minimum(tokens, self.model.vocab_size - 1)
        cache, logits = read_staged(self.model, params, cache, tokens, at, depth, mask)
        return cache, on_target(logits, self.vocab_size)


def read_staged(
    model: Model[ParamsT, CacheT],
    params: ParamsT,
    cache: CacheT,
    tokens: Array,
    at: Array,
    depth: Array | None = None,
    mask: Array | None = None,
) -> tuple[CacheT, Array]:
    """Stages `tokens` [B, T]; returns the cache, and float32 logits [B, M, V] after `at` [B, M].

    Without `depth` [T] and `mask` the tokens follow each other.
    """
    width = jnp.arange(tokens.shape[1]) if depth is None else depth
    out = model.apply(params, tokens, cache.length[:, None] + width, cache, mask)
    logits = jnp.take_along_axis(out.logits, at[..., None], axis=1)
    return out.staged, logits.astype(jnp.float32)


def DraftModel(
    model: Model, vocab_size: int, num_drafts: int = 4, confidence_threshold: float = 0.0
) -> Chain:
    """Drafts a chain with a smaller model: `Chain(DraftSource(model, vocab_size), ...)`.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> specjax.DraftModel(draft.model, vocab_size=512, num_drafts=4).max_depth
      4
    """
    return Chain(DraftSource(model, vocab_size), num_drafts, confidence_threshold)


def DraftTree(model: Model, vocab_size: int, branching: Sequence[int] = (3, 2, 1)) -> StaticTree:
    """Drafts a tree with a smaller model: `StaticTree(DraftSource(model, vocab_size), ...)`.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> specjax.DraftTree(draft.model, vocab_size=512, branching=(3, 2)).num_nodes
      10
    """
    return StaticTree(DraftSource(model, vocab_size), cast(tuple[int, ...], branching))
