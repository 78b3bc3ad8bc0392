"""The key/value cache is a transaction: a pass *stages* behind `length`, `commit` keeps.  There is no rollback.

    slots      0 . . . . . . length . . . . . . . . . . . capacity
               committed     | staged by the last pass | scratch

A worked example, one row, length 3, a proposal of four nodes of which the root `r` and node `b` are accepted:

    staged              x y z r a b c . .      length 3
    commit(2, [0, 2])   x y z r b b c . .      length 5     (what lies behind is scratch again)

A chain keeps its first tokens, so its commit moves nothing: it only advances the length.  A draft that has committed
its own guesses in order to read on takes the length back (`rewind`), and they are scratch, of which it commits again
what the target keeps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding

from specjax.contract import Cache

_UNROLLED_ROWS = 16


def stage(buffer: Array, new: Array, start: Array, sharding: NamedSharding | None = None) -> Array:
    """Write `new` [B, K, N, D] into `buffer` [B, K, S, D] at slots start[b] ... start[b] + N - 1.

    The caller guarantees start + N <= S: a slice update would move to fit, over committed slots.  On a mesh the
    buffer lies as `sharding` says, and stays so: what travels is the new tokens.
    """
    new = new.astype(buffer.dtype)
    if sharding is None and buffer.shape[0] <= _UNROLLED_ROWS:
        # One slice update a row stays in place; a vmapped one becomes a scatter, which a CPU runs element by element.
        if (
            buffer.dtype.itemsize == 2
            and len(buffer) > 1
            and jnp.issubdtype(buffer.dtype, jnp.floating)
        ):
            # In a row of updates XLA:CPU turns a bfloat16 buffer into float32 and back around each; whole numbers stay.
            words, new_words = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (buffer, new))
            written = stage(words, new_words, start)
            return jax.lax.bitcast_convert_type(written, buffer.dtype)
        zero = jnp.zeros_like(start[0])
        for row in range(buffer.shape[0]):
            at = (zero + row, zero, start[row], zero)  # of one type, whether or not x64 is on
            buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], at)
        return buffer
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    if sharding is None:
        return jax.vmap(update)(buffer, new, start)
    hold = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    return hold(jax.vmap(update)(hold(buffer), hold(new), start))


def visible_slots(length: Array, width: int, capacity: int, mask: Array | None) -> Array:
    """Which slots each staged token sees: the committed ones, and the staged ones that `mask` names.

    Args:
      length: [B] committed tokens.
      width: N, the number of staged tokens.
      capacity: S.
      mask: [B or 1, N, N] bool, or None for causal.

    Returns:
      [B, N, S] bool.
    """
    return _seen(jnp.arange(capacity) - length[:, None], width, mask)


def _seen(offset: Array, width: int, mask: Array | None) -> Array:
    """`visible_slots` where slot s holds the token that stands `offset[b, s]` behind the first staged one."""
    if mask is None:
        return offset[:, None] <= jnp.arange(width)[:, None]
    staged = (offset >= 0) & (offset < width)
    at = jnp.clip(offset, 0, width - 1)
    named = jnp.take_along_axis(
        jnp.broadcast_to(mask, (len(offset), width, width)), at[:, None], axis=2
    )
    return (offset < 0)[:, None] | (staged[:, None] & named)


@struct.dataclass
class KVCache(Cache):
    """Keys and values of every layer, each its own leaf so that a donated cache is updated in place."""

    keys: tuple[Array, ...]  # a layer: [B, K, S, D]
    values: tuple[Array, ...]
    length: Array  # [B] int32
    sharding: NamedSharding | None = struct.field(
        pytree_node=False, default=None
    )  # of the layers, on a mesh

    commits_paths = True
    keeps_scratch = True

    @classmethod
    def zeros(cls, layers: int, batch: int, heads: int, size: int, dim: int, dtype: Any) -> Self:
        # Zeros, not empty memory: a masked slot is multiplied by zero, and zero times NaN is NaN.
        # A slot more than asked for: `stage` may write a blank behind the last one.
        def leaves():
            return tuple(jnp.zeros((batch, heads, size + 1, dim), dtype) for _ in range(layers))

        return cls(leaves(), leaves(), jnp.zeros(batch, jnp.int32))

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def layer(self, index: int) -> KVCache:
        """Of that layer alone."""
        return dataclasses.replace(self, keys=(self.keys[index],), values=(self.values[index],))

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """The keys and values [B, K, S, D] of a single layer, with new ones [B, K, N, D] behind the length."""
        (old_keys,), (old_values,) = self.keys, self.values
        put = functools.partial(stage, start=self.length, sharding=self.sharding)
        if keys.shape[2] == 1:
            # A single token is only a reshape away from its place, so that XLA:CPU would write it twice, for attention
            # and for the next step, each time into a copy of the whole buffer.  A blank behind it keeps the write one.
            keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0))) for x in (keys, values))
        return put(old_keys, keys), put(old_values, values)

    def visible(
        self, positions: Array, mask: Array | None = None, window: int | None = None
    ) -> Array:
        """Which slots of a single layer each staged token sees, [B, N, S] bool.

        Args:
          positions: [B, N] of the staged tokens.
          mask: as for `visible_slots`.
          window: of a layer with sliding-window attention: what lies as far before a token, or farther, is hidden.
        """
        width = positions.shape[1]
        place = self._places(width)
        offset = place - self.length[:, None]
        seen = _seen(offset, width, mask)
        if window is None:
            return seen
        # A committed token's position is its place in the text; a node of a tree may stand before its own.
        staged = jnp.take_along_axis(positions, jnp.clip(offset, 0, width - 1), axis=1)
        place = jnp.where((offset >= 0) & (offset < width), staged, place)
        return seen & (positions[:, :, None] - place[:, None] < window)

    def _places(self, width: int) -> Array:
        """[S or B, S] which token of the row's text, with `width` staged ones behind it, each slot of a layer holds."""
        return jnp.arange(self.capacity)

    def _slots(self, places: Array) -> Array:
        """Where a layer holds them."""
        return places

    def commit(self, count: Array, path: Array | None = None) -> KVCache:
        """Keep `count` [B] staged tokens: those at the nodes `path` [B, T] in that order, or the first ones."""
        cache = self
        if path is not None:
            kept = [self.layer(i)._keep(path) for i in range(len(self.keys))]
            keys, values = zip(*kept, strict=True)
            cache = dataclasses.replace(cache, keys=keys, values=values)
        return dataclasses.replace(cache, length=self.length + count)

    def _keep(self, path: Array) -> tuple[Array, Array]:
        slots = self._slots(self.length[:, None] + path)[:, None, :, None]
        return self.stage(
            *(jnp.take_along_axis(leaf, slots, axis=2) for leaf in (*self.keys, *self.values))
        )

    def rewind(self, to: KVCache) -> KVCache:
        """`to`, an earlier value, in the buffers of this one, so that they can be updated in place."""
        return dataclasses.replace(self, length=to.length)
