"""`PagedCache`: a KV cache whose rows have pages of a common memory, by a table.

    table    row 0: 3 1 0 0      row 1: 2 5 4 0          0: no page
    slots    slot s of a row is in slot s % page of its page s // page

The rows of a batch, and rows whose prompts are still being read, share one memory, and pages may
belong to several rows whose texts begin alike.  Whoever makes the table gives a row the pages that
it needs before a pass writes them.  Page 0 holds zeros and is never written, so what a row writes
where it has no page is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import by_platform
from specjax.caches.kv import KVCache
from specjax.caches.rounded import is_rounded, stored
from specjax.caches.sliding_window import WindowedCache

_T = TypeVar("_T")

Pool = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The pages of the keys and of the values of a cache, [P, K, page, D] for each layer."""


@struct.dataclass
class Pages:
    """The keys or values of all rows in one layer, as attention reads them.

    It has the shape and the dtype of the array [B, K, S, D] that it stands for.
    """

    pool: Array  # [P, K, page, D]
    table: Array  # [B, T] int32
    # True on a mesh, where no kernel of our own writes.
    split: bool = struct.field(pytree_node=False, default=False)

    @property
    def page(self) -> int:
        """The slots of a page."""
        return self.pool.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [B, K, S, D] of the array that these pages stand for."""
        _, heads, page, dim = self.pool.shape
        return len(self.table), heads, self.table.shape[1] * page, dim

    @property
    def size(self) -> int:
        """The number of elements of that array."""
        rows, heads, slots, dim = self.shape
        return rows * heads * slots * dim

    @property
    def dtype(self) -> DTypeLike:
        """The type of the elements."""
        return self.pool.dtype

    def part(self, start: Array | int, count: int) -> Array:
        """Returns the slots `start` to `start + count`, both multiples of a page, as an array."""
        first, some = start // self.page, count // self.page
        table = jax.lax.dynamic_slice_in_dim(self.table, first, some, 1)
        rows, heads, _, dim = self.shape
        return self.pool[table].swapaxes(1, 2).reshape(rows, heads, count, dim)

    def write(self, new: Array, start: Array) -> Pages:
        """Writes `new` [B, K, N, D] at slots start[b] ... of each row."""
        new = stored(new, self.dtype)
        forms: dict[str, Callable[..., Array]] = {}
        if not self.split and kernels.writes_pages(self.pool):
            forms["cpu"] = kernels.write_pages
        if not self.split and kernels.writes_pages_on_tpu(self.pool, new):
            forms["tpu"] = kernels.write_pages_on_tpu
        pool = by_platform(forms, _scatter, self.pool, new, self.table, start)
        return dataclasses.replace(self, pool=pool)

    def at(self, slots: Array) -> Array:
        """Returns the rows [B, K, N, D] of the slots [B, N]."""
        page = _pages_at(self.table, slots, self.page)
        return self.pool[page, :, slots % self.page].swapaxes(1, 2)

    def at_of_heads(self, slots: Array) -> Array:
        """Returns the rows [B, K, N, D] of the slots [B, K or 1, N], which differ by head."""
        page = jnp.take_along_axis(self.table[:, None], slots // self.page, axis=2)
        heads = jnp.arange(self.pool.shape[1])[:, None]
        return self.pool[page, heads, slots % self.page]


def _pages_at(table: Array, slots: Array, page: int) -> Array:
    """Returns the page of each of the slots [B, N]; 0 for those behind the table."""
    return jnp.take_along_axis(table, slots // page, axis=1, mode="fill", fill_value=0)


def _scatter(pool: Array, new: Array, table: Array, start: Array) -> Array:
    slots = start[:, None] + jnp.arange(new.shape[2])
    count, _, page, _ = pool.shape
    at = _pages_at(table, slots, page)
    at = jnp.where(at == 0, count, at)  # these are dropped
    words, new = _words(pool), _words(new)
    words = words.at[at, :, slots % page].set(new.swapaxes(1, 2), mode="drop")
    return _numbers_of(words, pool)


def _words(x: Array) -> Array:
    """Returns short numbers as integers; XLA:CPU would convert all pages to float32 and back."""
    if x.dtype in (jnp.bfloat16, jnp.float16):
        return jax.lax.bitcast_convert_type(x, jnp.uint16)
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if is_rounded(x.dtype) else x


def _numbers_of(words: Array, like: Array) -> Array:
    """Returns what `_words` made of numbers, as numbers."""
    same = words.dtype == like.dtype
    return words if same else jax.lax.bitcast_convert_type(words, like.dtype)


@struct.dataclass
class _Table:
    """Which pages the rows of a cache have."""

    table: Array | None = None  # [B, T] int32
    page: int = struct.field(pytree_node=False, default=0)  # slots

    @property
    def capacity(self) -> int:
        assert self.table is not None
        return self.table.shape[1] * self.page


@struct.dataclass
class PagedCache(_Table, KVCache):
    """A `KVCache` with pages: its keys and values are [P, K, page, D] for each layer.

    Without them (`without_pages`) it has the numbers of its rows only.
    """

    def stage(self, keys: Array, values: Array) -> tuple[Pages, Pages]:  # type: ignore[override]
        """Stages new keys and values [B, K, N, D] of a single layer; returns all of them."""
        mine, yours = self.whole()
        return mine.write(keys, self.length), yours.write(values, self.length)

    def with_layers(self, layers: Sequence[tuple[Pages, Pages]]) -> Self:  # type: ignore[override]
        keys, values = zip(*layers, strict=True) if layers else ((), ())
        return dataclasses.replace(
            self, keys=tuple(x.pool for x in keys), values=tuple(x.pool for x in values)
        )

    def _keep(self, path: Array) -> tuple[Pages, Pages]:  # type: ignore[override]
        slots = self.length[:, None] + path
        keys, values = (part.at(slots) for part in self.whole())
        return self.stage(keys, values)

    def whole(self) -> tuple[Pages, Pages]:  # type: ignore[override]
        (keys,), (values,) = self.keys, self.values
        assert self.table is not None
        split = self.sharding is not None
        return Pages(keys, self.table, split), Pages(values, self.table, split)


@struct.dataclass
class PagedWindows(_Table, WindowedCache):
    """A `WindowedCache` whose rings stay by row, and whose other layers have pages."""

    def layer(self, index: int) -> Any:
        """Returns the cache of a single layer, with pages or with a ring."""
        one = slice(index, index + 1)
        of = self.keys[one], self.values[one], self.length, self.sharding, self.by_kernel
        if _ring(self, index) is None:
            return PagedCache(*of, table=self.table, page=self.page)
        return WindowedCache(*of, windows=self.windows[one], rings=self.rings[one])

    def with_layers(self, layers: Sequence[tuple[Any, Any]]) -> Self:
        def arrays(parts: Sequence[Any]) -> tuple[Array, ...]:
            return tuple(x.pool if isinstance(x, Pages) else x for x in parts)

        keys, values = zip(*layers, strict=True)
        return dataclasses.replace(self, keys=arrays(keys), values=arrays(values))


Paged = PagedCache | PagedWindows
"""A cache in which some layers have pages."""

_KINDS = (PagedCache, PagedWindows)


def _ring(cache: KVCache, index: int) -> int | None:
    """Returns the slots of the ring of a layer, or None if it holds the whole text."""
    rings = cache.rings if isinstance(cache, WindowedCache) else ()
    return rings[index] if rings else None


def is_paged(x: object) -> bool:
    """Returns whether `x` is a cache with pages, for `jax.tree.map(..., is_leaf=is_paged)`."""
    return type(x) in _KINDS  # `isinstance` of an abstract class takes ten times as long


def can_have_pages(tree: object) -> bool:
    """Returns whether every KV cache in `tree` can have pages.

    Caches of models that do not take `Pages` cannot.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_cache)
    caches = [leaf for leaf in leaves if _is_cache(leaf)]
    kinds = KVCache, WindowedCache
    return all(type(x) in kinds and x.may_have_pages for x in caches)


def slots_of(tree: object) -> int:
    """Returns the slots of the largest layer in `tree` that holds a whole text; 0 without any."""
    caches = [x for x in jax.tree.leaves(tree, is_leaf=_is_cache) if _is_cache(x)]
    return max(
        (x.shape[2] for cache in caches for i, x in enumerate(cache.keys) if not _ring(cache, i)),
        default=0,
    )


def in_pages(tree: _T, page: int, count: int) -> _T:
    """Returns `tree` with pages for its KV caches, without their memory (`without_pages`).

    Args:
      tree: has caches that hold nothing yet.
      page: the slots of a page.
      count: the pages of a row, T.
    """

    def of(x: Any) -> Any:
        if not _is_cache(x):
            return x
        table = jnp.zeros((len(x.length), count), jnp.int32)
        more: dict[str, Any] = {"table": table, "page": page}
        if isinstance(x, WindowedCache):
            more |= {"windows": x.windows, "rings": x.rings, "by_kernel": x.by_kernel}
            return PagedWindows(_rings(x, x.keys), _rings(x, x.values), x.length, **more)
        return PagedCache((), (), x.length, **more)

    return jax.tree.map(of, tree, is_leaf=_is_cache)


def pools_of(tree: object, page: int, count: int) -> list[Pool]:
    """Returns `count` empty pages for each KV cache (or its shapes) in `tree`, in their order."""

    def zeros(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        shapes = ((count, x.shape[1], page, x.shape[3]) for x in leaves)
        return tuple(jnp.zeros(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True))

    caches = [x for x in jax.tree.leaves(tree, is_leaf=_is_cache) if _is_cache(x)]
    return [(zeros(_whole(x, x.keys)), zeros(_whole(x, x.values))) for x in caches]


def _whole(cache: KVCache, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the keys or values of the layers without a ring."""
    return tuple(x for i, x in enumerate(leaves) if _ring(cache, i) is None)


def _rings(cache: KVCache, leaves: tuple[Array, ...]) -> tuple[Any, ...]:
    """Returns the keys or values of all layers, None for those without a ring."""
    return tuple(None if _ring(cache, i) is None else x for i, x in enumerate(leaves))


def cleared(pools: list[Pool], pages: Array, count: Array) -> list[Pool]:
    """Returns the pools with zeros in the first `count` of `pages` [M].

    What an earlier row left may not be a number, and a slot that is not seen is multiplied by 0.
    """

    def clear(pool: Array) -> Array:
        words = _words(pool)
        zeros = jnp.zeros_like(words[:1])

        def one(index: Array, words: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(words, zeros, pages[index], 0)

        return _numbers_of(jax.lax.fori_loop(0, count, one, words), pool)

    return jax.tree.map(clear, pools)


def copied_page(pools: list[Pool], source: Array, target: Array) -> list[Pool]:
    """Returns the pools with the keys and values of the page `source` in the page `target`."""

    def copy(pool: Array) -> Array:
        words = _words(pool)
        page = jax.lax.dynamic_slice_in_dim(words, source, 1)
        return _numbers_of(jax.lax.dynamic_update_slice_in_dim(words, page, target, 0), pool)

    return jax.tree.map(copy, pools)


def without_pages(tree: _T) -> tuple[_T, list[Pool]]:
    """Takes the pages out of the caches of `tree`; returns both."""
    pools: list[Pool] = []

    def of(x: Any) -> Any:
        if not is_paged(x):
            return x
        pools.append((_whole(x, x.keys), _whole(x, x.values)))
        if isinstance(x, PagedWindows):
            return dataclasses.replace(x, keys=_rings(x, x.keys), values=_rings(x, x.values))
        return dataclasses.replace(x, keys=(), values=())

    return jax.tree.map(of, tree, is_leaf=is_paged), pools


def with_pages(tree: _T, pools: Sequence[Pool]) -> _T:
    """Returns `tree` with the pages of its caches, as `without_pages` returned them."""
    left = iter(pools)

    def of(x: Any) -> Any:
        keys, values = next(left)
        if isinstance(x, PagedWindows):
            keys, values = _joined(x.keys, keys), _joined(x.values, values)
        return dataclasses.replace(x, keys=keys, values=values)

    def _joined(rings: tuple[Any, ...], pools: tuple[Array, ...]) -> tuple[Array, ...]:
        others = iter(pools)
        return tuple(next(others) if ring is None else ring for ring in rings)

    return _map(of, tree)


class Joint(Generic[_T]):
    """`with_pages` and `without_pages` for many trees of one structure.

    A call only takes the leaves to other places, which an engine does in each turn.
    """

    def __init__(self, tree: _T, pools: Sequence[Pool]) -> None:
        """Learns the places from a tree without its pages, and from the pages."""
        (_, parted), (_, pages) = map(jax.tree.flatten, (tree, pools))
        some, more = parted.num_leaves, pages.num_leaves
        numbers = parted.unflatten(range(some)), pages.unflatten(range(some, some + more))
        self._order, self._whole = jax.tree.flatten(with_pages(*numbers))
        self._parted, self._pages = parted, pages
        places = sorted(range(some + more), key=self._order.__getitem__)
        self._rest, self._pools = places[:some], places[some:]

    def join(self, tree: _T, pools: Sequence[Pool]) -> _T:
        """Returns `with_pages(tree, pools)`."""
        leaves = jax.tree.leaves(tree) + jax.tree.leaves(pools)
        return self._whole.unflatten([leaves[index] for index in self._order])

    def part(self, tree: _T) -> tuple[_T, list[Pool]]:
        """Returns `without_pages(tree)`."""
        leaves = jax.tree.leaves(tree)
        rest, pools = ([leaves[n] for n in places] for places in (self._rest, self._pools))
        return self._parted.unflatten(rest), self._pages.unflatten(pools)


def with_table(tree: _T, change: Callable[[Array | None], Array]) -> _T:
    """Returns `tree` with `change` of the table of each cache."""
    return _map(lambda x: dataclasses.replace(x, table=change(x.table)), tree)


def _map(change: Callable[[Any], Any], tree: _T) -> _T:
    return jax.tree.map(lambda x: change(x) if is_paged(x) else x, tree, is_leaf=is_paged)


def _is_cache(x: object) -> bool:
    return isinstance(x, KVCache)
