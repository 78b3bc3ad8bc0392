"""A layer with sliding-window attention keeps its window alone: its slots are a ring between two margins.

    ring of 8, window 3, margins of 2; place p of the text lies in slot p % 8 of the ring

    slots    . .|8 9 a b 4 5 6 7|. .        a is the last committed token, b is staged; no token sees 4 ... 7 any more

A pass is written twice, each time as one slice: where it begins, running over into the right margin, and a turn of the
ring before that, from inside the left one.  So nothing of the ring is read in order to be written, and it stays where
it is.  Margins are as wide as a pass of decoding; a wider one, of a prompt, renews the whole ring.

What is staged overwrites what no token sees any more, also when it is scratch that is committed later: the ring holds
the window and all that may be written before the length is taken back.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches.kv import KVCache

_NOWHERE = -(2**30)  # before every window


@struct.dataclass
class WindowedCache(KVCache):
    """Of a model in which some layers have a window."""

    windows: tuple[int | None, ...] = struct.field(pytree_node=False, default=())  # by layer
    rings: tuple[int | None, ...] = struct.field(
        pytree_node=False, default=()
    )  # by layer: R, or None: the whole text

    def narrow(self, ahead: int, widest: int) -> WindowedCache:
        """This empty cache, with a ring in every layer whose window makes one that is smaller.

        Args:
          ahead: the most tokens that are written behind the length before `rewind` takes it back, or a `commit` keeps
            some of them.
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

    def layer(self, index: int) -> WindowedCache:
        own = {name: getattr(self, name)[index : index + 1] for name in ("windows", "rings")}
        return dataclasses.replace(
            self, keys=(self.keys[index],), values=(self.values[index],), **own
        )

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        ring, margin, width = *self._ring, keys.shape[2]
        if ring is None:
            return super().stage(keys, values)
        if width > margin:
            return self._renew(ring, margin, keys, self.keys[0]), self._renew(
                ring, margin, values, self.values[0]
            )
        at = self.length % ring
        found = KVCache.stage(dataclasses.replace(self, length=margin + at), keys, values)
        if width == 1:
            return found
        # What has not come to the end of the ring lies in the margin, all of it.
        again = margin + jnp.maximum(at - ring, -width)
        return KVCache.stage(
            dataclasses.replace(self, keys=found[:1], values=found[1:], length=again), keys, values
        )

    def _renew(self, ring: int, margin: int, new: Array, buffer: Array) -> Array:
        slot = jnp.arange(buffer.shape[2]) - margin
        index = (slot - self.length[:, None]) % ring  # of the token that would lie there
        written = (index < new.shape[2]) & (slot >= 0) & (slot < ring)
        new = jnp.take_along_axis(
            new, jnp.minimum(index, new.shape[2] - 1)[:, None, :, None], axis=2
        )
        buffer = jnp.where(written[:, None, :, None], new.astype(buffer.dtype), buffer)
        return (
            buffer
            if self.sharding is None
            else jax.lax.with_sharding_constraint(buffer, self.sharding)
        )

    @property
    def _ring(self) -> tuple[int | None, int]:
        """Of a single layer: its slots, and those of each margin."""
        ring = self.rings[0] if self.rings else None
        return ring, 0 if ring is None else (self.capacity - ring) // 2

    def _places(self, width: int) -> Array:
        ring, margin = self._ring
        if ring is None:
            return super()._places(width)
        slot, last = jnp.arange(self.capacity) - margin, (self.length + width - 1)[:, None]
        place = last - (last - slot) % ring
        # Where the text has not come yet there is nothing, and nobody looks into the margins.
        return jnp.where((place < 0) | (slot < 0) | (slot >= ring), _NOWHERE, place)

    def _slots(self, places: Array) -> Array:
        ring, margin = self._ring
        return places if ring is None else margin + places % ring
