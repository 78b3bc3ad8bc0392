"""The cache of a model in which some layers keep keys and values, others a state, or both."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Self

from flax import struct
from jax import Array

from specjax.caches.kv import KVCache
from specjax.caches.layer_state import LayerState
from specjax.contract import Cache


class Both(NamedTuple):
    """What a layer keeps that has keys and values and a state."""

    slots: KVCache | tuple[Array, Array]  # the layer's cache, or its keys and values with new ones
    state: LayerState


Written = tuple[Array, Array] | LayerState | Both
"""What a pass returns of a layer's cache: with the new tokens staged."""


@struct.dataclass
class HybridCache(Cache):
    """A `KVCache` of the layers with keys and values, and a `LayerState` of those with a state."""

    attention: KVCache
    states: tuple[LayerState, ...]
    # By layer: whether it has the next of `states`.
    recurrent: tuple[bool, ...] = struct.field(pytree_node=False)
    # By layer: whether it has the next of `attention`; by default if it has no state.
    attends: tuple[bool, ...] = struct.field(pytree_node=False, default=())

    commits_paths = True

    @property
    def length(self) -> Array:  # type: ignore[override]
        """[B] int32, the number of committed tokens."""
        return self.attention.length

    def layer(self, index: int) -> KVCache | LayerState | Both:
        """Returns the cache of a single layer."""
        attends = self.attends or tuple(not state for state in self.recurrent)
        state = self.states[sum(self.recurrent[:index])] if self.recurrent[index] else None
        slots = self.attention.layer(sum(attends[:index])) if attends[index] else None
        if state is None:
            assert slots is not None
            return slots
        return state if slots is None else Both(slots, state)

    def with_layers(self, layers: list[Written]) -> Self:
        """Returns this cache with what a pass has staged in each layer."""
        parts = [
            part for layer in layers for part in (layer if isinstance(layer, Both) else (layer,))
        ]
        states = tuple(part for part in parts if isinstance(part, LayerState))
        pairs = [part for part in parts if not isinstance(part, LayerState | KVCache)]
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
