"""`PageSizes`: the pages of an engine, and which of its caches have them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.caches import (
    HybridCache,
    KVCache,
    Paged,
    can_have_pages,
    in_pages,
    is_paged,
    slots_of,
)
from specjax.contract import ArrayTree
from specjax.serve.reading import Reader, Reading
from specjax.types import Params

PAGES = (16, 32, 64, 128)
"""The sizes that a page may have, in tokens."""

PAGE = 64
"""The tokens of a page (64): attention on a CPU reads as many slots at a time."""


@dataclasses.dataclass(frozen=True)
class PageSizes:
    """Sizes of an engine with pages.

    Attributes:
      page: tokens of a page.
      count: pages, without the page 0.
      of_a_row: T, the most pages of a row.
      parts: the proposers whose caches have pages; those of others are held by slot.
      ahead: the slots that a row needs behind its text, of the target and of each proposer.
      partly: a proposer has KV caches without pages.
    """

    page: int
    count: int
    of_a_row: int
    parts: tuple[int, ...]
    ahead: tuple[int, ...]
    partly: bool

    @classmethod
    def of(cls, reader: Reader, params: Params, page: int, tokens: int, name: str) -> PageSizes:
        """Returns the sizes of an engine.

        Args:
          reader: of its prompts.
          page: tokens of a page.
          tokens: of all pages.
          name: of the target.

        Raises:
          ValueError: the target cannot have pages, or a text of the whole capacity has no room.
        """
        reading = jax.eval_shape(reader.empty, params)
        if not (slots_of(reading.cache) and can_have_pages(reading.cache)):
            raise ValueError(
                f"cache_tokens={tokens}, and the cache of {name} cannot have pages: it has only "
                "rings of sliding windows or states, or is one of your own; leave cache_tokens "
                "out, and each slot has room for capacity= tokens"
            )
        parts = tuple(n for n in range(len(reading.own)) if _follows(reader, reading, n))
        pieces = [slots_of(reading.cache), *(slots_of(own) for own in reading.own)]
        paged = [pieces[0], *(pieces[1 + n] for n in parts)]
        of_a_row = -(-max(paged) // page)
        ahead = tuple(max(0, slots - reader.capacity) for slots in pieces)
        count = tokens // page
        if count < of_a_row:
            raise ValueError(
                f"cache_tokens={tokens} are {count} pages of {page} tokens, and a text of the "
                f"whole capacity needs {of_a_row}: pass cache_tokens={of_a_row * page} or more, "
                "or a smaller capacity="
            )
        held = [n for n, own in enumerate(reading.own) if n not in parts and _has_cache(own)]
        return cls(page, count, of_a_row, parts, ahead, bool(held))

    def split(self, reading: Reading) -> Reading:
        """Returns an empty reading with pages, without their memory."""
        own = list(reading.own)
        for n in self.parts:
            own[n] = in_pages(own[n], self.page, self.of_a_row)
        cache = in_pages(reading.cache, self.page, self.of_a_row)
        return dataclasses.replace(reading, cache=cache, own=tuple(own))

    def step(self, chunk: int) -> int:
        """Returns the tokens of which beginnings are shared: whole pages and whole chunks."""
        return math.lcm(self.page, chunk)


def caches(tree: object) -> list[Paged]:
    """Returns the caches with pages in `tree`."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_paged) if is_paged(x)]


def _has_cache(tree: ArrayTree) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, KVCache))
    return any(isinstance(x, KVCache) for x in leaves)


def _plain(tree: ArrayTree) -> ArrayTree:
    """Returns `tree` with a cache of only keys and values by slot in the place of each cache."""

    def of(x: object) -> object:
        cache = x.attention if isinstance(x, HybridCache) else x
        if not isinstance(cache, KVCache):
            return x
        return KVCache(cache.keys, cache.values, cache.length)

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, HybridCache | KVCache))


def _follows(reader: Reader, reading: Reading, index: int) -> bool:
    """Returns whether a proposer has KV caches that hold the target's tokens, slot by slot."""
    part, own = reader.several.parts[index], reading.own[index]
    if not slots_of(own) or not can_have_pages(own):
        return False
    last = reading.ends
    last = None if last is None else jax.ShapeDtypeStruct((1, last.shape[-1]), last.dtype)

    def first(own: ArrayTree, last: jax.Array | None) -> ArrayTree | None:
        # States and rings are kept in snapshots, so here they are left out.
        own, features = _plain(own), reader.several.features(index, last)
        return part.truncate(own, jnp.zeros(1, jnp.int32), features)

    return jax.eval_shape(first, own, last) is not None
