"""KV caches whose layers with sliding-window attention keep only their window, in a ring of slots.

    a ring of 8 with margins of 2, window 3; token p of the text is in slot p % 8 of the ring

    slots    . .|8 9 a b 4 5 6 7|. .        a is the last committed token, b is staged; no token
                                            attends to 4 ... 7 any more

A pass is written twice, each time as one slice: once at its slot, where it may run over into the
right margin, and once a full turn earlier, where it may begin in the left margin.  So a write
updates its buffer in place and does not depend on the old contents.  The margins are as wide as a
decoding pass.  A pass over a prompt is wider and rewrites the whole ring.

The ring holds the window and all tokens that may be written before a rewind.  So staged tokens
overwrite only tokens that have left every window, even if they become scratch and are committed
later.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches.kv import KVCache
from specjax.caches.rounded import stored

_NOWHERE = -(2**30)  # before every window


@struct.dataclass
class WindowedCache(KVCache):
    """The KV cache of a model in which some layers have a sliding window."""

    windows: tuple[int | None, ...] = struct.field(pytree_node=False, default=())  # by layer
    # By layer: the slots of its ring, or None where it holds the whole text.
    rings: tuple[int | None, ...] = struct.field(pytree_node=False, default=())

    def narrow(self, ahead: int, widest: int) -> Self:
        """Returns this empty cache, with a ring in every layer where a ring saves memory.

        Args:
          ahead: the most tokens that are written after the length before a `commit` or `rewind`.
          widest: the most tokens of a pass over the prompt.
        """

        def ring(window: int | None) -> int | None:
            size = (window or 0) + max(ahead, widest)
            return None if window is None or size + 2 * ahead >= self.capacity else size

        rings = tuple(map(ring, self.windows))

        def cut(leaves: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(
                x if r is None else x[:, :, : r + 2 * ahead]
                for x, r in zip(leaves, rings, strict=True)
            )

        return dataclasses.replace(self, keys=cut(self.keys), values=cut(self.values), rings=rings)

    def truncate(self, count: Array) -> Self | None:
        # A ring has overwritten the tokens before its window.
        return None if any(self.rings) else super().truncate(count)

    def layer(self, index: int) -> Self:
        one = slice(index, index + 1)  # `rings` is empty before `narrow`
        windows, rings = self.windows[one], self.rings[one]
        return dataclasses.replace(super().layer(index), windows=windows, rings=rings)

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        ring, margin, width = *self._ring, keys.shape[2]
        if ring is None:
            return super().stage(keys, values)
        if width > margin:
            new_keys = self._rewrite(ring, margin, keys, self.keys[0])
            return new_keys, self._rewrite(ring, margin, values, self.values[0])
        at = self.length % ring
        first = dataclasses.replace(self, length=margin + at)
        written = KVCache.stage(first, keys, values)
        if width == 1:
            return written
        # A pass that does not cross the end of the ring lands entirely in the left margin.
        again = margin + jnp.maximum(at - ring, -width)
        second = dataclasses.replace(self, keys=written[:1], values=written[1:], length=again)
        return KVCache.stage(second, keys, values)

    def _rewrite(self, ring: int, margin: int, new: Array, buffer: Array) -> Array:
        slot = jnp.arange(buffer.shape[2]) - margin
        index = (slot - self.length[:, None]) % ring  # of the new token for each slot
        new = stored(new, buffer.dtype)
        written = (index < new.shape[2]) & (slot >= 0) & (slot < ring)
        new = jnp.take_along_axis(
            new, jnp.minimum(index, new.shape[2] - 1)[:, None, :, None], axis=2
        )
        buffer = jnp.where(written[:, None, :, None], new, buffer)
        if self.sharding is None:
            return buffer
        return jax.lax.with_sharding_constraint(buffer, self.sharding)

    @property
    def _ring(self) -> tuple[int | None, int]:
        """Returns the slots of a layer's ring, and of each margin."""
        ring = self.rings[0] if self.rings else None
        return ring, 0 if ring is None else (self.capacity - ring) // 2

    def _text_index(self, width: int) -> Array:
        ring, margin = self._ring
        if ring is None:
            return super()._text_index(width)
        slot, last = jnp.arange(self.capacity) - margin, (self.length + width - 1)[:, None]
        index = last - (last - slot) % ring
        # Slots that hold no token yet and the margins are never visible.
        return jnp.where((index < 0) | (slot < 0) | (slot >= ring), _NOWHERE, index)

    def _slots(self, index: Array) -> Array:
        ring, margin = self._ring
        return index if ring is None else margin + index % ring
