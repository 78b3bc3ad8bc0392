"""`TranslatedSource`: a smaller language model with another tokenizer than the target's."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import empty_cache, read_prompt
from specjax.contract import ArrayTree, Cache, Context, Loaded, Lookahead, Model, Source
from specjax.methods.draft_model.source import read_staged
from specjax.models import on_target
from specjax.proposers import Chain, remember, then_pending
from specjax.text import Translation
from specjax.types import ABSENT, Block, Proposal


@struct.dataclass
class TranslatedParams:
    """The parameters of a draft model with another tokenizer, and the translation between both."""

    model: ArrayTree
    translation: Translation


@struct.dataclass
class TranslatedState:
    cache: Cache  # of the draft model, for draft tokens
    fresh: Array  # [B, depth + 1] target tokens that are committed and the draft has not read
    count: Array  # [B] the number of those tokens
    room: Array  # [B] draft tokens that still fit; negative once the text no longer fits
    most: int = struct.field(pytree_node=False)  # draft tokens of a prompt that is read at once


class _Reading(NamedTuple):
    cache: Cache
    readable: Array  # [B] bool: has the draft read the whole text up to the pending token?


@dataclasses.dataclass(frozen=True)
class TranslatedSource(Source[TranslatedParams, TranslatedState, _Reading]):
    """A draft model whose tokens differ from the target's.

    The draft model reads each committed token of the target as one or more draft tokens that spell
    it.  Its logits are gathered onto the target's vocabulary, where they are warped and sampled.
    Tokens that its vocabulary lacks are never proposed, so every draft is a single token in both
    vocabularies.

    A text may need more draft tokens than are reserved (`expansion` for each target token) or than
    the draft model can read.  From then on its row has no drafts.  If the prompt itself is too
    long, the draft model reads only the end of it.

    Reference: Timor et al. 2025, arXiv 2502.05202, token-level intersection.
    """

    model: Model
    vocab_size: int  # the target's
    expansion: int = 2
    asks_draft = True

    def bind(self, target: Loaded, draft: Loaded | None) -> TranslatedParams:
        raise ValueError(
            "a proposer over a translated draft comes without its weights and tables: pass draft= "
            "alone, or drafter= with what specjax.make_drafter(target, draft) returns"
        )

    def init(
        self, params: TranslatedParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> TranslatedState:
        rows, depth, start = len(prompt.count), lookahead.depth, params.translation.start
        room, most = self._room(params, capacity, depth)
        ahead = _most_pieces(params, depth) + lookahead.staged - 1
        cache = empty_cache(self.model, rows, room, ahead)
        if len(start):
            tokens = jnp.broadcast_to(start, (rows, len(start)))
            count = jnp.full_like(prompt.count, len(start))
            cache = read_prompt(self.model, params.model, tokens, count, cache)[-1]
        fresh, none = jnp.zeros((rows, depth + 1), jnp.int32), jnp.zeros(rows, jnp.int32)
        return TranslatedState(cache, fresh, none, room - cache.length, most)

    def read(
        self, params: TranslatedParams, state: TranslatedState, block: Block
    ) -> TranslatedState:
        """Reads a whole prompt, of which only the end if it is too long for the draft, or a part.

        A row whose prompt comes in parts and is too long has no drafts.
        """
        translation, model = params.translation, params.model
        if block.whole:
            width = min(block.tokens.shape[1] * self.expansion, state.most)
            tokens, count = spell(translation, block.tokens, block.count, width)
            cache = read_prompt(self.model, model, tokens, count, state.cache)[-1]
            return dataclasses.replace(state, cache=cache, room=state.room - count)
        most = block.tokens.shape[1] * translation.pieces.shape[1]
        tokens, count = spell(translation, block.tokens, block.count, most)
        room = state.room - count
        count = jnp.where(room < 0, 0, count)
        # No wider than a pass that catches up, since the cache has room for one.
        width = _most_pieces(params, state.fresh.shape[1] - 1)
        tokens = jnp.pad(tokens, ((0, 0), (0, width)))

        def turn(carry: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, done = carry
            cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))
            more = jnp.clip(count - done, 0, width)
            return read_prompt(self.model, model, cut(tokens, done), more, cache)[-1], done + more

        carry = state.cache, jnp.zeros_like(count)
        cache, _ = jax.lax.while_loop(lambda carry: (carry[1] < count).any(), turn, carry)
        return dataclasses.replace(state, cache=cache, room=room)

    def catch_up(self, params: TranslatedParams, state: TranslatedState) -> TranslatedState:
        most = _most_pieces(params, state.fresh.shape[1] - 1)
        tokens, count = spell(params.translation, state.fresh, state.count, most)
        room = state.room - count
        count = jnp.where(room < 0, 0, count)
        staged, _ = self._read(params, state.cache, tokens, jnp.maximum(count - 1, 0)[:, None])
        nothing = jnp.zeros_like(state.count)
        return dataclasses.replace(state, cache=staged.commit(count), count=nothing, room=room)

    def _room(self, params: TranslatedParams, capacity: int, depth: int) -> tuple[int, int]:
        """Returns the most draft tokens of a text, and the most of them that spell its prompt.

        If the draft cannot read every text, half of the room is kept for what follows the prompt.
        """
        start, catch_up = params.translation.start, _most_pieces(params, depth)
        wanted = capacity * self.expansion + len(start)
        room = min(wanted, self.model.max_positions - catch_up - depth)
        most = (room if room == wanted else room // 2) - len(start)
        if most < 1:
            raise ValueError(
                f"the draft reads at most {self.model.max_positions} tokens, too few to propose "
                f"{depth} and to read {catch_up} at once: pass a draft with more context, "
                "or a smaller num_drafts"
            )
        return room, most

    def begin(
        self, params: TranslatedParams, state: TranslatedState, context: Context
    ) -> tuple[TranslatedState, _Reading, Array]:
        translation, pending = params.translation, context.pending
        # Catch up in one pass: the newly committed tokens, then the pending one.
        unread = then_pending(state.fresh, state.count, pending)
        most = _most_pieces(params, state.fresh.shape[1] - 1)
        tokens, count = spell(translation, unread, state.count + 1, most)
        keep = count - translation.count[pending]
        room = state.room - keep
        # If a text no longer fits, nothing more is committed: the draft's cache stays stale.
        keep = jnp.where(room < 0, 0, keep)
        staged, logits = self._read(params, state.cache, tokens, jnp.maximum(count - 1, 0)[:, None])
        caught_up = dataclasses.replace(
            state, cache=staged.commit(keep), count=jnp.zeros_like(keep), room=room
        )
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
        """Returns [B, N] bool: False for tokens that the draft model's vocabulary lacks.

        The pending token is False if the draft model cannot read the text up to it.
        """
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
        cache: Cache,
        tokens: Array,
        at: Array,
        depth: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[Cache, Array]:
        """Stages draft tokens [B, T]; returns the cache, and logits [B, M, V] after those `at`."""
        tokens, to_draft = jnp.maximum(tokens, 0), jnp.asarray(params.translation.to_draft)
        cache, logits = read_staged(self.model, params.model, cache, tokens, at, depth, mask)
        return cache, on_target(logits, self.vocab_size, to_draft)


def _most_pieces(params: TranslatedParams, depth: int) -> int:
    """Returns the most draft tokens that spell a step's unread tokens, the pending one included.

    Accepted drafts take one draft token each.  The tokens before and after them were chosen by the
    target, and may take up to M draft tokens each.
    """
    return depth + 2 * params.translation.pieces.shape[1]


def spell(translation: Translation, tokens: Array, count: Array, width: int) -> tuple[Array, Array]:
    """Spells target tokens in draft tokens.

    Args:
      translation: the tables, with at most M pieces a token.
      tokens: [B, T] target tokens.
      count: [B] the number of tokens; the others are padding.
      width: of the result; a row that needs more keeps its last pieces.

    Returns:
      [B, width] draft tokens, right-padded with 0, and their number [B].

        the cat . .      count 2      pieces t he | c a t      ->     t he c a t 0 0 0      5
    """
    piece = jnp.arange(translation.pieces.shape[1])
    each = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], translation.count[tokens], 0)
    end = jnp.cumsum(each, axis=1, dtype=jnp.int32)
    start = end - each - jnp.maximum(end[:, -1:] - width, 0)
    slot = jnp.where(piece < each[..., None], start[..., None] + piece, ABSENT)
    slot = jnp.where(slot >= 0, slot, width)  # out of bounds, so mode="drop" leaves it out
    rows = jnp.arange(len(tokens))[:, None, None]
    spelt = (
        jnp.zeros((len(tokens), width), jnp.int32)
        .at[rows, slot]
        .set(translation.pieces[tokens], mode="drop")
    )
    return spelt, jnp.minimum(end[:, -1], width)


def Universal(
    model: Model,
    vocab_size: int,
    num_drafts: int = 4,
    expansion: int = 2,
    confidence_threshold: float = 0.0,
) -> Chain:
    """Drafts a chain with another tokenizer's model: `Chain(TranslatedSource(...), ...)`.

    Example:
      >>> draft = specjax.load(specjax.shipped("tiny/draft"))
      >>> specjax.Universal(draft.model, vocab_size=512, num_drafts=4).max_depth
      4
    """
    return Chain(TranslatedSource(model, vocab_size, expansion), num_drafts, confidence_threshold)


UniversalParams = TranslatedParams
