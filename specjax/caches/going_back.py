"""What decoding needs to go back to an earlier length: the part that later tokens overwrite.

    kept(state)              the states of layers, rings, lengths; no keys and values by slot
    restored(that, later)    the earlier state, with the keys and values of the later one

A `KVCache` never changes the slots of committed tokens, so an earlier length finds them there.  A
recurrent state and a ring of a sliding window have forgotten, and are kept whole.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax

from specjax.caches.kv import KVCache
from specjax.caches.sliding_window import WindowedCache

_T = TypeVar("_T")


def kept(tree: _T) -> _T:
    """Returns `tree` without the keys and values that later tokens leave in place."""

    def of(x: Any) -> Any:
        if not isinstance(x, KVCache):
            return x
        rings = x.rings if isinstance(x, WindowedCache) else ()
        own = [*rings, *[None] * (len(x.keys) - len(rings))]
        keys, values = (
            tuple(None if ring is None else leaf for ring, leaf in zip(own, leaves, strict=True))
            for leaves in (x.keys, x.values)
        )
        return dataclasses.replace(x, keys=keys, values=values)

    return jax.tree.map(of, tree, is_leaf=_is_cache)


def restored(before: _T, later: object) -> _T:
    """Returns the state of which `before` was kept.

    Args:
      before: from `kept`.
      later: a state whose text begins with the text of `before`.
    """
    caches = (x for x in jax.tree.leaves(later, is_leaf=_is_cache) if _is_cache(x))

    def of(x: Any) -> Any:
        if not isinstance(x, KVCache):
            return x
        now = next(caches)
        keys, values = (
            tuple(new if old is None else old for old, new in zip(*pair, strict=True))
            for pair in ((x.keys, now.keys), (x.values, now.values))
        )
        return dataclasses.replace(x, keys=keys, values=values)

    return jax.tree.map(of, before, is_leaf=_is_cache)


def _is_cache(x: object) -> bool:
    return isinstance(x, KVCache)
