"""`ChoosingCache`: the first and last slots of a KV cache, and chunks between that queries choose.

    slots     0 1 | 2 3 4 | 5 6 7 | 8 9 10 | 11 12 13 14        first=2, last=3, chunk=3
              first  chunk   chunk   chunk    a started chunk, and the last three
    chosen    0 1 |         5 6 7 |          11 12 13 14        selected=1

Each key head of each row chooses its own chunks, by the least and the greatest number of each
channel among a chunk's keys.  With them a query bounds its scores with all keys of a chunk from
above, and the chunks with the greatest bounds are chosen.  Heads that share keys choose together,
by the greatest of their bounds.

Reference: Tang et al. 2024 (Quest), arXiv 2406.10774, section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches.kv import SPARE_SLOTS, KVCache, slots_at, whole_slots
from specjax.caches.pages import Pages
from specjax.caches.rounded import as_read

_TURN = 128
"""The slots that a turn of `summarised` reads."""


def chunks_of_turn(chunk: int) -> int:
    """Returns how many chunks `summarised` reads in a turn; so many more must have room."""
    return max(1, _TURN // chunk)


def summarised(
    chunks: KVCache, cache: KVCache, first: int, chunk: int, once: bool = False
) -> KVCache:
    """Returns the bounds of all whole chunks that are committed, or of some more of them.

    Args:
      chunks: the bounds so far: a slot for each chunk, the greatest numbers as keys, and the least
        ones as values.
      cache: the committed tokens.
      first: the slots before the first chunk.
      chunk: the slots of a chunk.
      once: take one turn, without a loop, whose condition a GPU's host would wait for.
    """
    whole, some = jnp.maximum(cache.length - first, 0) // chunk, chunks_of_turn(chunk)

    def turn(chunks: KVCache) -> KVCache:
        slots = first + chunks.length[:, None] * chunk + jnp.arange(some * chunk)
        index = jnp.minimum(slots, cache.capacity - 1)[:, None]
        written = []
        for layer in range(len(chunks.keys)):
            own = chunks.layer(layer)
            keys, _ = cache.layer(layer).whole()
            read = as_read(_taken(keys, index), own.keys[0].dtype)
            split = read.reshape(*read.shape[:2], some, chunk, read.shape[3])
            written.append(own.stage(split.max(3), split.min(3)))
        done = jnp.minimum(chunks.length + some, whole)
        return dataclasses.replace(chunks.with_layers(written), length=done)

    if once:
        return turn(chunks)
    return jax.lax.while_loop(lambda chunks: (chunks.length < whole).any(), turn, chunks)


def _taken(part: Array | Pages, index: Array) -> Array:
    """Returns the slots `index` [B, K or 1, N] of keys or values, [B, K, N, D]."""
    if isinstance(part, Pages):
        return part.at_of_heads(index)
    return slots_at(part, index)


def _best(bounds: Array, count: int, split: bool) -> Array:
    """Returns the places of the greatest bounds [..., C], best first.

    Args:
      split: the heads are on several devices, to which `top_k` would send all bounds.
    """
    if not split:
        return jax.lax.top_k(bounds, count)[1]
    places = jnp.broadcast_to(jnp.arange(bounds.shape[-1]), bounds.shape)
    return jax.lax.sort((-bounds, places), num_keys=1)[1][..., :count]


@struct.dataclass
class ChoosingCache:
    """What a pass over the pending tokens reads; it leaves a `KVCache` of what was chosen.

    For each layer, attention calls `chosen` with its queries.  This returns the layer's cache, in
    which attention stages its tokens.  A row of few tokens keeps all of them.
    """

    cache: KVCache  # committed tokens
    chunks: KVCache  # of `summarised`
    first: int = struct.field(pytree_node=False)
    last: int = struct.field(pytree_node=False)
    chunk: int = struct.field(pytree_node=False)
    selected: int = struct.field(pytree_node=False)
    room: int = struct.field(pytree_node=False)  # for tokens that will be staged

    @property
    def length(self) -> Array:
        """[B] the tokens of a row that a head reads."""
        between, known = self._counts()
        return self.cache.length - (between - jnp.minimum(known, self.selected)) * self.chunk

    def layer(self, index: int) -> ChoosingCache:
        """Returns the cache of a single layer."""
        one, chunks = self.cache.layer(index), self.chunks.layer(index)
        return dataclasses.replace(self, cache=one, chunks=chunks)

    def with_layers(self, layers: Sequence[tuple[Array, Array]]) -> KVCache:
        """Returns the chosen slots of all layers, with the tokens that they staged."""
        keys, values = zip(*layers, strict=True)
        of = self.cache
        return KVCache(tuple(keys), tuple(values), self.length, of.sharding, of.by_kernel)

    def visible(
        self,
        positions: Array,
        mask: Array | None = None,
        window: int | None = None,
        chunked: bool = False,
    ) -> Array:
        """Returns [B, N, S] bool, for a single layer: a token sees all that its row has chosen."""
        assert window is None and not chunked
        slots = jnp.arange(self._kept_slots() + self._free_slots())
        width = jnp.arange(positions.shape[1])
        return (slots - self.length[:, None])[:, None] <= width[:, None]

    def chosen(self, query: Array) -> KVCache:
        """Returns the first and last slots of a single layer, and the chunks of these queries.

        Args:
          query: [B, N, H, D].
        """
        between, known = self._counts()
        bounds = self._bounds(query, known)
        kept = jnp.minimum(known, self.selected)[:, None, None]
        count = min(self.selected, bounds.shape[2])
        best = _best(bounds, count, self.cache.sharding is not None)
        # Free slots repeat a token: to fill them with zeros, XLA would pad each array.
        slot = jnp.arange(self._kept_slots() + self._free_slots())
        place, within = jnp.divmod(jnp.maximum(slot - self.first, 0), self.chunk)
        of_place = best[:, :, jnp.minimum(place, count - 1)]
        moved = jnp.where(slot < self.first, 0, between[:, None, None] - kept) * self.chunk
        is_chosen = (slot >= self.first) & (place < kept)
        index = jnp.where(is_chosen, self.first + of_place * self.chunk + within, slot + moved)
        index = jnp.minimum(index, self.cache.capacity - 1)
        keys, values = (_taken(part, index) for part in self.cache.whole())
        return self.with_layers([(keys, values)])

    def _counts(self) -> tuple[Array, Array]:
        """Returns [B] the whole chunks before the last tokens, and those that have bounds."""
        between = jnp.maximum(self.cache.length - self.first - self.last, 0) // self.chunk
        return between, jnp.minimum(between, self.chunks.length)

    def _kept_slots(self) -> int:
        """Returns the most slots that a head reads."""
        most = self.first + self.selected * self.chunk + self.last + self.chunk - 1
        return min(most, self.cache.capacity)

    def _free_slots(self) -> int:
        """Returns the slots behind those."""
        kept = self._kept_slots()
        return whole_slots(kept + self.room + SPARE_SLOTS) - kept

    def _bounds(self, query: Array, count: Array) -> Array:
        """Returns [B, K, C] float32: of all scores of a chunk's keys; -inf: it is none of them."""
        (greatest,), (least,) = self.chunks.keys, self.chunks.values
        rows, width, heads, dim = query.shape
        kind, key_heads = greatest.dtype, greatest.shape[1]
        grouped = query.reshape(rows, width, key_heads, heads // key_heads, dim).astype(kind)

        def scores(part: Array, bound: Array) -> Array:
            return jnp.einsum("bnkgd,bkcd->bkngc", part, bound, preferred_element_type=jnp.float32)

        bounds = scores(jnp.maximum(grouped, 0), greatest) + scores(jnp.minimum(grouped, 0), least)
        is_chunk = jnp.arange(greatest.shape[2]) < count[:, None, None]
        return jnp.where(is_chunk, bounds.max((2, 3)), -jnp.inf)
