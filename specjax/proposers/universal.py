"""`universal`: a smaller language model with a tokenizer of its own guesses a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import empty_cache, read_prompt
from specjax.proposers.chain import ModelChain
from specjax.text import Translation
from specjax.types import ABSENT, Block, Model, Proposal


@struct.dataclass
class UniversalParams:
    model: Any
    translation: Translation


@struct.dataclass
class UniversalState:
    cache: Any  # of the draft's own tokens
    fresh: Array  # [B, num_drafts + 1] tokens that the target committed and the draft has not read
    count: Array  # [B] how many
    room: Array  # [B] draft tokens that still fit; negative once the text has outgrown the cache


@dataclasses.dataclass(frozen=True)
class Universal(ModelChain):
    """`num_drafts` tokens, drawn one after the other from a `model` that need not share the target's tokens.

    What the target commits is spelt in the draft's tokens and read, several for one where need be.  What the draft
    says is gathered onto the target's vocabulary, where it is warped and drawn from: a token that the draft does not
    have is never proposed, so that every guess is one token of both.

    A text of the target may take more draft tokens than were reserved (`expansion` for each, on average), or than the
    draft can read; from then on its row proposes nothing.  Of a prompt that long the end is read.

    Reference: Timor et al. 2025, arXiv 2502.05202, token-level intersection.
    """

    model: Model
    vocab_size: int  # the target's
    num_drafts: int = 4
    expansion: int = 2

    def init(self, params: UniversalParams, prompt: Block, capacity: int) -> UniversalState:
        rows, width = prompt.tokens.shape
        start = params.translation.start
        catch_up, wanted = self._catch_up(params), capacity * self.expansion + len(start)
        room = min(wanted, self.model.max_positions - catch_up - self.num_drafts)
        # Where the text cannot fit, the prompt leaves room for what follows it.
        width = min(width * self.expansion, room - len(start) if room == wanted else room // 2 - len(start))
        if width < 1:
            raise ValueError(
                f"the draft reads at most {self.model.max_positions} tokens, too few to propose {self.num_drafts} "
                f"and to read {catch_up} at once: pass a draft with more context, or a smaller num_drafts"
            )
        tokens, count = spell(params.translation, prompt.tokens, prompt.count, width)
        tokens = jnp.concatenate([jnp.broadcast_to(start, (rows, len(start))), tokens], axis=1)
        cache = empty_cache(self.model, rows, room, catch_up + self.num_drafts)
        _, cache = read_prompt(self.model, params.model, tokens, count + len(start), cache)
        fresh = jnp.zeros((rows, self.num_nodes), jnp.int32)
        return UniversalState(cache, fresh, jnp.zeros(rows, jnp.int32), room - cache.length)

    def propose(
        self, params: UniversalParams, state: UniversalState, pending: Array, draw: Any, warp: Callable
    ) -> tuple[Proposal, UniversalState]:
        translation, to_draft = params.translation, params.translation.to_draft
        # Catch up: the tokens committed since, then the pending one, in one pass.
        tokens, count = spell(translation, self._unread(state, pending), state.count + 1, self._catch_up(params))
        keep = count - translation.count[pending]
        room = state.room - keep
        keep = jnp.where(room < 0, 0, keep)  # where it does not fit it is scratch, and so is all that follows
        one = jnp.ones_like(keep)
        staged, logits = self._read(params, state.cache, tokens, jnp.maximum(count - 1, 0))

        def read(cache, tokens):
            cache, logits = self._read(params, cache, to_draft[tokens][:, None], jnp.zeros_like(keep))
            return cache.commit(one), logits

        # Look ahead, and take it back afterwards: the drafts stay scratch, and the last one is never read.
        proposal, cache = self._look_ahead(read, staged.commit(count), logits, pending, draw, warp)
        # Nothing follows from a text of which the draft knows nothing new, nor from a token that it does not have.
        known = jnp.cumprod(to_draft[proposal.tokens[:, 1:]] >= 0, axis=1) > 0
        known = jnp.pad(known & ((room >= 0) & (count > 0))[:, None], ((0, 0), (1, 0)))
        proposal = dataclasses.replace(proposal, parent=jnp.where(known, proposal.parent, ABSENT))
        cache = cache.rewind(staged.commit(keep))
        return proposal, UniversalState(cache, state.fresh, jnp.zeros_like(keep), room)

    def _catch_up(self, params: UniversalParams) -> int:
        """Draft tokens that spell a step's: guesses are one each, and what the target chose itself may take more."""
        return self.num_drafts + 2 * params.translation.pieces.shape[1]

    def _read(self, params: UniversalParams, cache: Any, tokens: Array, at: Array) -> tuple[Any, Array]:
        """Stage `tokens` [B, T]; the cache, and the logits [B, V] after token `at` [B] on the target's vocabulary."""
        positions = cache.length[:, None] + jnp.arange(tokens.shape[1])
        out = self.model.apply(params.model, jnp.maximum(tokens, 0), positions, cache)
        logits = out.logits[jnp.arange(len(at)), at].astype(jnp.float32)
        to_draft = params.translation.to_draft
        return out.cache, jnp.where(to_draft >= 0, logits[:, to_draft], -jnp.inf)


def spell(translation: Translation, tokens: Array, count: Array, width: int) -> tuple[Array, Array]:
    """Write target tokens in the draft's.

    Args:
      translation: the tables, with at most M pieces a token.
      tokens: [B, T] of the target.
      count: [B] how many of them are there.
      width: of the result; of a row that needs more the last pieces are kept.

    Returns:
      [B, width] draft tokens, right-padded with 0, and how many [B].

        the cat . .      count 2      pieces t he | c a t      ->     t he c a t 0 0 0      5
    """
    place = jnp.arange(translation.pieces.shape[1])
    each = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], translation.count[tokens], 0)
    end = jnp.cumsum(each, axis=1, dtype=jnp.int32)
    start = end - each - jnp.maximum(end[:, -1:] - width, 0)
    slot = jnp.where(place < each[..., None], start[..., None] + place, ABSENT)
    slot = jnp.where(slot >= 0, slot, width)  # beyond the result: dropped
    rows = jnp.arange(len(tokens))[:, None, None]
    spelt = jnp.zeros((len(tokens), width), jnp.int32).at[rows, slot].set(translation.pieces[tokens], mode="drop")
    return spelt, jnp.minimum(end[:, -1], width)
