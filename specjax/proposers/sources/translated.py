"""`translated`: a smaller language model with a tokenizer of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import empty_cache, read_prompt
from specjax.contract import Context, Loaded, Lookahead, Model, Source
from specjax.proposers.sources.catch_up import remember, then_pending
from specjax.text import Translation
from specjax.types import ABSENT, Block, Proposal


@struct.dataclass
class TranslatedParams:
    model: Any
    translation: Translation


@struct.dataclass
class TranslatedState:
    cache: Any  # of the draft's own tokens
    fresh: Array  # [B, depth + 1] tokens that the target committed and the draft has not read
    count: Array  # [B] how many
    room: Array  # [B] draft tokens that still fit; negative once the text has outgrown the cache


class _Reading(NamedTuple):
    cache: Any
    readable: Array  # [B] bool: does the draft know the text up to the pending token?


@dataclasses.dataclass(frozen=True)
class TranslatedSource(Source):
    """A `model` that need not share the target's tokens.

    What the target commits is spelt in the draft's tokens and read, several for one where need be.
    The draft's logits are gathered onto the target's vocabulary, where they are warped and drawn
    from.  A token that the draft does not have is never proposed, so every draft is one token of
    both.

    A text of the target may take more draft tokens than were reserved (`expansion` for each, on
    average), or than the draft can read.  From then on its row proposes nothing.  Of a prompt that
    long the end is read.

    Reference: Timor et al. 2025, arXiv 2502.05202, token-level intersection.
    """

    model: Model
    vocab_size: int  # the target's
    expansion: int = 2
    asks_draft = True

    def bind(self, target: Loaded, draft: Loaded | None) -> Any:
        raise ValueError(
            "a proposer over a translated draft comes without its weights and tables: pass draft= alone, "
            "or drafter= with what specjax.make_drafter(target, draft) returns"
        )

    def init(
        self, params: TranslatedParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> TranslatedState:
        rows, width = prompt.tokens.shape
        depth, start = lookahead.depth, params.translation.start
        catch_up, wanted = _most_pieces(params, depth), capacity * self.expansion + len(start)
        room = min(wanted, self.model.max_positions - catch_up - depth)
        # Where the text cannot fit, the prompt leaves room for what follows it.
        width = min(
            width * self.expansion, room - len(start) if room == wanted else room // 2 - len(start)
        )
        if width < 1:
            raise ValueError(
                f"the draft reads at most {self.model.max_positions} tokens, too few to propose {depth} "
                f"and to read {catch_up} at once: pass a draft with more context, or a smaller num_drafts"
            )
        tokens, count = spell(params.translation, prompt.tokens, prompt.count, width)
        tokens = jnp.concatenate([jnp.broadcast_to(start, (rows, len(start))), tokens], axis=1)
        cache = empty_cache(self.model, rows, room, catch_up + lookahead.staged - 1)
        cache = read_prompt(self.model, params.model, tokens, count + len(start), cache)[-1]
        fresh = jnp.zeros((rows, depth + 1), jnp.int32)
        return TranslatedState(cache, fresh, jnp.zeros(rows, jnp.int32), room - cache.length)

    def begin(
        self, params: TranslatedParams, state: TranslatedState, context: Context
    ) -> tuple[TranslatedState, _Reading, Array]:
        translation, pending = params.translation, context.pending
        # Catch up: the tokens committed since, then the pending one, in one pass.
        unread = then_pending(state.fresh, state.count, pending)
        most = _most_pieces(params, state.fresh.shape[1] - 1)
        tokens, count = spell(translation, unread, state.count + 1, most)
        keep = count - translation.count[pending]
        room = state.room - keep
        keep = jnp.where(
            room < 0, 0, keep
        )  # what does not fit is scratch, and so is all that follows
        staged, logits = self._read(params, state.cache, tokens, jnp.maximum(count - 1, 0)[:, None])
        caught_up = TranslatedState(staged.commit(keep), state.fresh, jnp.zeros_like(keep), room)
        return caught_up, _Reading(staged.commit(count), (room >= 0) & (count > 0)), logits[:, 0]

    def extend(
        self, params: TranslatedParams, reading: _Reading, tokens: Array
    ) -> tuple[_Reading, Array]:
        spelt = params.translation.to_draft[tokens][:, None]
        cache, logits = self._read(params, reading.cache, spelt, jnp.zeros_like(spelt))
        return reading._replace(cache=cache.commit(jnp.ones_like(tokens))), logits[:, 0]

    def read_tree(
        self,
        params: TranslatedParams,
        reading: _Reading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[_Reading, Array]:
        spelt = params.translation.to_draft[tokens]
        cache, logits = self._read(params, reading.cache, spelt, at, depth, mask)
        return reading._replace(cache=cache), logits

    def known(self, params: TranslatedParams, reading: _Reading, tokens: Array) -> Array:
        """Nothing follows from a text that the draft cannot read, nor from a token that it lacks."""
        return (params.translation.to_draft[tokens] >= 0).at[:, 0].set(reading.readable)

    def end(
        self,
        params: TranslatedParams,
        state: TranslatedState,
        reading: _Reading,
        proposal: Proposal,
    ) -> TranslatedState:
        return dataclasses.replace(state, cache=reading.cache.rewind(state.cache))

    def observe(
        self, params: TranslatedParams, state: TranslatedState, block: Block
    ) -> TranslatedState:
        fresh, count = remember(state.fresh, block)
        return dataclasses.replace(state, fresh=fresh, count=count)

    def _read(
        self,
        params: TranslatedParams,
        cache: Any,
        tokens: Array,
        at: Array,
        depth: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Any, Array]:
        """Stage `tokens` [B, T] of the draft; the cache, and logits [B, M, V] after the tokens `at`."""
        positions = cache.length[:, None] + (
            jnp.arange(tokens.shape[1]) if depth is None else depth
        )
        out = self.model.apply(params.model, jnp.maximum(tokens, 0), positions, cache, mask)
        logits = jnp.take_along_axis(out.logits, at[..., None], axis=1).astype(jnp.float32)
        to_draft = params.translation.to_draft
        return out.cache, jnp.where(to_draft >= 0, logits[..., to_draft], -jnp.inf)


def _most_pieces(params: TranslatedParams, depth: int) -> int:
    """Draft tokens that spell a step's: drafts are one each, the target's own choice may take more."""
    return depth + 2 * params.translation.pieces.shape[1]


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
    spelt = (
        jnp.zeros((len(tokens), width), jnp.int32)
        .at[rows, slot]
        .set(translation.pieces[tokens], mode="drop")
    )
    return spelt, jnp.minimum(end[:, -1], width)
