"""Reading a prompt chunk by chunk, by the target and by the proposers that read prompts, too.

    prompt     . . . . . . . . . . .|.        the last token is pending: nothing reads it
    chunks     [ whole ][ whole ][ ]          the last one is as narrow as it may be

The bounds of the chunks depend on the length of the prompt alone.  So a prompt is read with the
same bits whatever else is served, and a whole chunk at the beginning of two prompts has the same
keys and values in both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import KVCache, WindowedCache, empty_cache
from specjax.contract import Arrays, Cache, Model, Proposer
from specjax.decoding import slots_ahead
from specjax.methods import (
    BlockDraftSource,
    DatastoreSource,
    DraftSource,
    MedusaSource,
    stage_context,
)
from specjax.proposers import BestFirst, ChoiceTree, NGram, Shape
from specjax.serve.per_row import PerRow
from specjax.types import ABSENT, Block, Params

_NARROWEST = 8


@struct.dataclass
class Reading:
    """One row whose prompt is being read."""

    cache: Cache  # the target's
    own: tuple[Arrays, ...]  # of each part; None for those that read the whole prompt at the end
    hidden: Array | None  # [1, L, E] and [1, L, sum E], for those parts; None if there are none
    features: Array | None


def widths(chunk: int) -> tuple[int, ...]:
    """The widths of the passes over a prompt, ascending."""
    return tuple(sorted({chunk, *(w for w in (chunk >> n for n in (1, 2, 3)) if w >= _NARROWEST)}))


def passes(start: int, count: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """The start, the number of tokens and the width of each pass over tokens `start` to `count`."""
    for at in range(start, count, chunk):
        tokens = min(chunk, count - at)
        yield at, tokens, next(width for width in widths(chunk) if width >= tokens)


@dataclasses.dataclass(frozen=True)
class Reader:
    """The parts of a decoder, as functions of one row's `Reading`.

    Attributes:
      capacity: slots for tokens, a multiple of the width of a chunk.
    """

    target: Model
    several: PerRow
    capacity: int

    @functools.cached_property
    def kinds(self) -> tuple[type | None, ...]:
        """For each part the class that says how it reads chunks; None: the whole prompt at once."""
        return tuple(map(_kind, self.several.parts))

    def copies(self, cache: Cache) -> bool:
        """Whether the first tokens of a row can be copied into another one."""
        rings = cache.rings if isinstance(cache, WindowedCache) else ()
        is_whole = isinstance(cache, KVCache) and not any(rings)
        return is_whole and None not in self.kinds and all(map(self._copies, self.several.parts))

    def _copies(self, part: Proposer) -> bool:
        if not isinstance(part, Shape) or not isinstance(part.source, DraftSource):
            return True
        model = part.source.model
        cache = jax.eval_shape(lambda: empty_cache(model, 1, self.capacity, 1))
        return isinstance(cache, KVCache) and not isinstance(cache, WindowedCache)

    def empty(self, params: Params) -> Reading:
        """The reading of a row before its prompt."""
        cache = empty_cache(self.target, 1, self.capacity, slots_ahead(self.several))
        tokens = jnp.zeros((1, 1), jnp.int32)
        out = self._apply(params, tokens, jnp.zeros((1, 1), jnp.int32), cache)
        block = Block(tokens, out.hidden, jnp.zeros(1, jnp.int32), out.features)
        own = tuple(
            None if kind is None else self.several.begin(n, params.proposer, block, self.capacity)
            for n, kind in enumerate(self.kinds)
        )

        def buffer(x: Array | None) -> Array | None:
            if x is None or None not in self.kinds:
                return None
            return jnp.zeros((1, self.capacity, x.shape[-1]), x.dtype)

        return Reading(cache, own, buffer(out.hidden), buffer(out.features))

    def read(
        self,
        params: Params,
        reading: Reading,
        tokens: Array,
        start: Array,
        count: Array,
        uses: Array,
    ) -> Reading:
        """Read the first `count` of `tokens` [1, W], which begin at `start` of the text.

        Args:
          uses: [parts] bool; the other parts do not read.
        """
        at = jnp.minimum(start + jnp.arange(tokens.shape[1]), self.target.max_positions - 1)
        out = self._apply(params, tokens, at[None], reading.cache)
        block = Block(tokens, out.hidden, count[None], out.features)
        own = tuple(
            part if kind is None else self._read_part(n, params, part, block, uses[n])
            for n, (kind, part) in enumerate(zip(self.kinds, reading.own, strict=True))
        )

        def keep(buffer: Array | None, new: Array | None) -> Array | None:
            if buffer is None or new is None:
                return None
            zero = jnp.zeros_like(start)
            return jax.lax.dynamic_update_slice(buffer, new, (zero, start, zero))

        return Reading(
            out.cache.commit(count[None]),
            own,
            keep(reading.hidden, out.hidden),
            keep(reading.features, out.features),
        )

    def finish(
        self, params: Params, reading: Reading, prompt: Array, count: Array, uses: Array
    ) -> tuple[Arrays, ...]:
        """The states of the parts after the first `count` tokens of `prompt` [1, L]."""
        own = []
        for n, (kind, part) in enumerate(zip(self.kinds, reading.own, strict=True)):
            if kind is not None:
                own.append(part)
                continue
            assert reading.hidden is not None
            block = Block(prompt, reading.hidden, count[None], reading.features)
            nothing = jax.tree.map(lambda x: x[:, :1] if x.ndim > 1 else jnp.zeros_like(x), block)
            whole, none = (
                functools.partial(self.several.begin, n, params.proposer, b, self.capacity)
                for b in (block, nothing)
            )
            # A state whose shape depends on the width of the prompt is made for every row.
            is_same = jax.tree.leaves(jax.eval_shape(whole)) == jax.tree.leaves(
                jax.eval_shape(none)
            )
            own.append(jax.lax.cond(uses[n], whole, none) if is_same else whole())
        return tuple(own)

    def first(self, cache: Cache, own: tuple[Arrays, ...], count: Array) -> Reading:
        """The reading of a row after the first `count` tokens of a row that holds more.

        Args:
          cache, own: of one row, or of the row that is read already.
        """
        assert isinstance(cache, KVCache)

        def cut(cache: KVCache) -> KVCache:
            return dataclasses.replace(cache, length=jnp.full_like(cache.length, count))

        parts = []
        for kind, state in zip(self.kinds, own, strict=True):
            if kind in (NGram, DatastoreSource):
                state = dataclasses.replace(state, length=jnp.full_like(state.length, count))
            elif kind in (DraftSource, BlockDraftSource):
                zero = jnp.zeros_like(state.count)
                state = dataclasses.replace(state, cache=cut(state.cache), count=zero)
                if kind is DraftSource and state.ahead is not None:
                    state = dataclasses.replace(state, ahead=jnp.full_like(state.ahead, ABSENT))
            parts.append(state)
        return Reading(cut(cache), tuple(parts), None, None)

    def _apply(self, params: Params, tokens: Array, positions: Array, cache: Cache):
        return self.target.apply(params.target, tokens, positions, cache, taps=self.several.taps)

    def _read_part(
        self, index: int, params: Params, state: Arrays, block: Block, wanted: Array
    ) -> Arrays:
        """The state of a part after more of the prompt; not `wanted`: it stays."""
        part, own = self.several.parts[index], params.proposer[index]
        seen = self.several.seen(index, block)

        def turn(carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            return jnp.zeros_like(carry[0]), _read_more(part, own, carry[1], seen)

        return jax.lax.while_loop(lambda carry: carry[0], turn, (wanted, state))[1]


def _kind(part: Proposer) -> type | None:
    if isinstance(part, NGram):
        return NGram
    if not isinstance(part, Shape | ChoiceTree | BestFirst):
        return None
    kinds = (DraftSource, DatastoreSource, MedusaSource, BlockDraftSource)
    return next((kind for kind in kinds if type(part.source) is kind), None)


def _read_more(part: Proposer, params: Arrays, state: Arrays, block: Block) -> Arrays:
    """The state of a proposer after more of the prompt."""
    source = None if isinstance(part, NGram) else part.source  # type: ignore[attr-defined]
    if isinstance(source, DraftSource):
        positions = state.cache.length[:, None] + jnp.arange(block.tokens.shape[1])
        positions = jnp.minimum(positions, source.model.max_positions - 1)
        out = source.model.apply(params, block.tokens, positions, state.cache)
        return dataclasses.replace(state, cache=out.cache.commit(block.count))
    if isinstance(source, BlockDraftSource):
        assert block.features is not None
        features = block.features.astype(state.fresh.dtype)
        cache = stage_context(source.net, params.own["draft"], features, state.cache)
        return dataclasses.replace(state, cache=cache.commit(block.count))
    # Other parts observe the block as they do in a step.
    return part.observe(params, state, block)
