"""The cache of a model in which some layers keep keys and values, and others a state."""

from __future__ import annotations

import dataclasses
from typing import Self

from flax import struct
from jax import Array

from specjax.caches.kv import KVCache
from specjax.caches.layer_state import LayerState
from specjax.contract import Cache


@struct.dataclass
class HybridCache(Cache):
    """A `KVCache` of the layers with keys and values, and a `LayerState` of each other layer."""

    attention: KVCache
    states: tuple[LayerState, ...]
    # By layer: True if it is the next of `states`, False if the next of `attention`.
    recurrent: tuple[bool, ...] = struct.field(pytree_node=False)

    commits_paths = True

    @property
    def length(self) -> Array:  # type: ignore[override]
        """[B] int32, the number of committed tokens."""
        return self.attention.length

    def layer(self, index: int) -> KVCache | LayerState:
        """Returns the cache of a single layer."""
        before = sum(self.recurrent[:index])
        if self.recurrent[index]:
            return self.states[before]
        return self.attention.layer(index - before)

    def with_layers(self, layers: list[tuple[Array, Array] | LayerState]) -> Self:
        """Returns this cache with what a pass has staged in each layer."""
        states = tuple(layer for layer in layers if isinstance(layer, LayerState))
        pairs = [layer for layer in layers if not isinstance(layer, LayerState)]
        return dataclasses.replace(self, attention=self.attention.with_layers(pairs), states=states)

    def commit(self, count: Array, path: Array | None = None) -> Self:
        states = tuple(state.commit(count, path) for state in self.states)
        return dataclasses.replace(
            self, attention=self.attention.commit(count, path), states=states
        )

    def rewind(self, to: Cache) -> Self:
        assert isinstance(to, HybridCache)
        states = tuple(
            own.rewind(earlier) for own, earlier in zip(self.states, to.states, strict=True)
        )
        return dataclasses.replace(self, attention=self.attention.rewind(to), states=states)

    def widened(self, width: int) -> Self:
        states = tuple(state.widened(width) for state in self.states)
        return dataclasses.replace(self, states=states)

    def staged_as(self, shapes: Cache) -> Self:
        assert isinstance(shapes, HybridCache)
        pairs = zip(self.states, shapes.states, strict=True)
        return dataclasses.replace(self, states=tuple(own.staged_as(to) for own, to in pairs))

    def narrow(self, ahead: int, widest: int) -> Self:
        return dataclasses.replace(self, attention=self.attention.narrow(ahead, widest))
