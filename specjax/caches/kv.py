"""The KV cache.  A pass *stages* tokens after `length`, and `commit` keeps some of them.

    slots      0 . . . . . . length . . . . . . . . . . . capacity
               committed     | staged by the last pass | scratch

An example of one row, length 3, and a proposal of four nodes of which the root `r` and the node `b`
are accepted:

    staged              x y z r a b c . .      length 3
    commit(2, [0, 2])   x y z r b b c . .      length 5     (slots after it are scratch again)

The accepted drafts of a chain are its first tokens, so a commit moves nothing and only advances the
length.  A draft model commits each of its drafts so that it can draft the next one.  `rewind` then
resets the length, and after the verification the draft model commits the accepted drafts again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from specjax import kernels
from specjax._internal.platforms import by_platform, on_gpu, platform_of_shapes
from specjax.caches.rounded import CACHE_DTYPES, stored, stored_size
from specjax.contract import Cache

_UNROLLED_ROWS = 16
_GPU_SLOTS = 128
"""The slots of a cache on a GPU are a multiple of this; XLA would copy others to pad them."""

SPARE_SLOTS = 1
"""Slots (1) that a cache has beyond those it needs: `stage` pads a single token to two on a CPU."""


def whole_slots(count: int) -> int:
    """Returns the slots of a cache that needs so many."""
    return -(-count // _GPU_SLOTS) * _GPU_SLOTS if platform_of_shapes() == "gpu" else count


def stage(
    buffer: Array,
    new: Array,
    start: Array,
    sharding: NamedSharding | None = None,
    spare: bool = False,
    by_kernel: bool = False,
) -> Array:
    """Writes `new` [B, K, N, D] into `buffer` [B, K, S, D] at slots start[b] ... start[b] + N - 1.

    The caller guarantees start + N <= S: otherwise XLA would clamp the start and overwrite
    committed slots.  On a mesh the buffer keeps `sharding`, and only the new tokens are sent.

    Args:
      spare: slot start[b] + N exists too, and may be overwritten.
      by_kernel: a kernel writes 16-bit numbers on a CPU, where there is one.
    """
    new = stored(new, buffer.dtype)
    by_slices = sharding is None and len(buffer) <= _UNROLLED_ROWS
    by_rows = functools.partial(_write_rows, sharding=sharding)
    write = _write_slices if by_slices else by_rows
    # A GPU would write the slice of each row with a kernel of its own.
    on_gpus = by_rows if len(buffer) > 1 else write
    padded = spare and new.shape[2] == 1
    halves = buffer.dtype in (jnp.bfloat16, jnp.float16)
    # XLA:CPU converts a bfloat16 buffer to float32 and back around each update.  It leaves a buffer
    # of integers as it is, but copies it.  Only a kernel writes such a buffer in place.
    by_kernel = by_kernel and sharding is None and halves and kernels.writes_slots(buffer)
    as_words = by_slices and halves and len(buffer) > 1
    if not padded and not as_words and not by_kernel:
        if on_gpus is write:
            return write(buffer, new, start)
        return on_gpu(on_gpus, write, buffer, new, start)

    def cpu(buffer: Array, new: Array, start: Array) -> Array:
        if by_kernel:
            return kernels.write_slots(buffer, new, start)
        if padded:
            # For N = 1 XLA:CPU copies the whole buffer twice, for attention and for the next step.
            # Padding to two tokens avoids it.
            new = jnp.pad(new, ((0, 0), (0, 0), (0, 1), (0, 0)))
        if not as_words:
            return write(buffer, new, start)
        words, new_words = (jax.lax.bitcast_convert_type(x, jnp.uint16) for x in (buffer, new))
        return jax.lax.bitcast_convert_type(write(words, new_words, start), buffer.dtype)

    forms = {"cpu": cpu, "cuda": on_gpus, "rocm": on_gpus}
    return by_platform(forms, write, buffer, new, start)


def slots_at(buffer: Array, index: Array) -> Array:
    """Returns the slots `index` [B, K or 1, N], all below S, of `buffer` [B, K, S, D]."""
    # By default JAX compares what it took with the bounds, in another pass over it.
    mode = "promise_in_bounds"
    return jnp.take_along_axis(buffer, index[..., None], axis=2, mode=mode)


def _write_slices(buffer: Array, new: Array, start: Array) -> Array:
    """Writes with one slice update per row, which is in place."""
    zero = jnp.zeros_like(start[0])
    for row in range(len(buffer)):
        at = (zero + row, zero, start[row], zero)  # indices of one dtype, also under x64
        buffer = jax.lax.dynamic_update_slice(buffer, new[row : row + 1], at)
    return buffer


def _write_rows(
    buffer: Array, new: Array, start: Array, sharding: NamedSharding | None = None
) -> Array:
    """Writes with a vmapped update, which becomes a scatter.  A CPU runs it element by element."""
    update = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1))
    if sharding is None:
        return update(buffer, new, start)
    hold = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
    return hold(update(hold(buffer), hold(new), start))


def visible_slots(length: Array, width: int, capacity: int, mask: Array | None) -> Array:
    """Returns which slots each staged token attends to: the committed, and others by `mask`.

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
    """Computes `visible_slots`, where slot s of row b holds token `offset[b, s]` of the row.

    Offset 0 is the first staged token, and committed tokens have negative offsets.
    """
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
    """Keys and values, one leaf per layer, so that a donated cache is updated in place."""

    keys: tuple[Array, ...]  # a layer: [B, K, S, D]
    values: tuple[Array, ...]
    length: Array  # [B] int32
    # Of each array in `keys` and `values`, on a mesh; None on one device.
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)
    # Whether a kernel of our own reads a few tokens' slots.  XLA's attention converts a cache of
    # bfloat16 together with the new tokens; for a kernel nothing else may convert it.
    by_kernel: bool = struct.field(pytree_node=False, default=False)
    # True if a reader of this cache may get `Pages` in the place of keys and values.
    may_have_pages: bool = struct.field(pytree_node=False, default=False)

    commits_paths = True
    keeps_scratch = True

    @classmethod
    def zeros(
        cls, layers: int, batch: int, heads: int, size: int, dim: int, dtype: DTypeLike
    ) -> Self:
        """Makes an empty cache of `layers` layers with K = `heads`, S = `size` + `SPARE_SLOTS`.

        On a GPU S is rounded up to a multiple of 128.
        """
        return cls.of([(heads, dim, dim)] * layers, batch, size, dtype)

    @classmethod
    def of(
        cls, layers: Sequence[tuple[int, int, int]], batch: int, size: int, dtype: DTypeLike
    ) -> Self:
        """Makes an empty cache; each layer has its own K, size of a key, and size of a value."""

        # Zeros, not uninitialised memory: a masked slot is multiplied by 0, and 0 times NaN is NaN.
        def leaves(which: int) -> tuple[Array, ...]:
            slots = whole_slots(size + SPARE_SLOTS)
            shapes = ((batch, sizes[0], slots, sizes[which]) for sizes in layers)
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        return cls(leaves(1), leaves(2), jnp.zeros(batch, jnp.int32))

    def rounded(self, name: str) -> Self:
        """Returns this empty cache with keys and values in 8 bits, one of `CACHE_DTYPES`."""
        dtype = CACHE_DTYPES[name]

        def zeros(x: Array) -> Array:
            return jnp.zeros((*x.shape[:3], stored_size(x.shape[3], dtype)), dtype)

        keys, values = jax.tree.map(zeros, (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, by_kernel=False)

    @property
    def capacity(self) -> int:
        """S, the number of slots of the first layer."""
        return self.keys[0].shape[2]

    def truncate(self, count: Array) -> Self | None:
        return dataclasses.replace(self, length=jnp.broadcast_to(count, self.length.shape))

    def layer(self, index: int) -> Self:
        """Returns the cache of a single layer."""
        return dataclasses.replace(self, keys=(self.keys[index],), values=(self.values[index],))

    def first(self, count: int) -> Self:
        """Returns the cache of the first layers."""
        return dataclasses.replace(self, keys=self.keys[:count], values=self.values[:count])

    def whole(self) -> tuple[Array, Array]:
        """Returns the keys and values of a single layer, as attention reads them."""
        (keys,), (values,) = self.keys, self.values
        return keys, values

    def with_layers(self, layers: Sequence[tuple[Array, Array]]) -> Self:
        """Returns this cache with the keys and values of each layer, as `stage` returned them."""
        keys, values = zip(*layers, strict=True) if layers else ((), ())
        return dataclasses.replace(self, keys=keys, values=values)

    def next_positions(self, width: int) -> Array:
        """Returns [B, N] the positions of the `width` tokens after the committed ones."""
        return self.length[:, None] + jnp.arange(width)

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Stages new keys and values [B, K, N, D] of a single layer; returns all, [B, K, S, D]."""
        (old_keys,), (old_values,) = self.keys, self.values
        few = self.by_kernel and keys.shape[2] <= kernels.MOST_TOKENS
        put = functools.partial(
            stage, start=self.length, sharding=self.sharding, spare=True, by_kernel=few
        )
        return put(old_keys, keys), put(old_values, values)

    def visible(
        self,
        positions: Array,
        mask: Array | None = None,
        window: int | None = None,
        chunked: bool = False,
    ) -> Array:
        """Returns [B, N, S] bool, for a single layer: the slots that each staged token attends to.

        Args:
          positions: [B, N] of the staged tokens.
          mask: as for `visible_slots`.
          window: of a layer with sliding-window attention: a token does not attend to tokens that
            are `window` or more positions before it.
          chunked: it does not attend to tokens before the last multiple of `window`.
        """
        width = positions.shape[1]
        index = self._text_index(width)
        offset = index - self.length[:, None]
        seen = _seen(offset, width, mask)
        if window is None:
            return seen
        # The position of a committed token is its index in the text.  That of a tree's node is its
        # depth, which may be less.
        staged = jnp.take_along_axis(positions, jnp.clip(offset, 0, width - 1), axis=1)
        slot_positions = jnp.where((offset >= 0) & (offset < width), staged, index)
        if chunked:
            return seen & (positions[:, :, None] // window == slot_positions[:, None] // window)
        return seen & (positions[:, :, None] - slot_positions[:, None] < window)

    def _text_index(self, width: int) -> Array:
        """Returns [S] or [B, S]: the index in the row's text of the token in each slot.

        The text includes the `width` staged tokens.
        """
        return jnp.arange(self.capacity)

    def _slots(self, index: Array) -> Array:
        """Returns the slots of a layer that hold the tokens at `index` of the row's text."""
        return index

    def near(self, first: int, last: int, room: int) -> Self:
        """Returns a small copy with only the `first` and the `last` committed tokens of each row.

        A row of fewer tokens keeps all of them, so its length is at most `first + last`.  Slots
        after the length have room for `room` staged tokens.
        """
        kept = first + last
        slot = jnp.arange(whole_slots(min(kept, self.capacity) + room + SPARE_SLOTS))
        moved = jnp.where(slot < first, 0, jnp.maximum(self.length[:, None] - kept, 0))
        # Free slots repeat a token: to fill them with zeros, XLA would pad each array.
        index = jnp.minimum(slot + moved, self.capacity - 1)[:, None]
        taken = functools.partial(slots_at, index=index)
        keys, values = jax.tree.map(taken, (self.keys, self.values))
        return dataclasses.replace(
            self, keys=keys, values=values, length=jnp.minimum(self.length, kept)
        )

    def commit(self, count: Array, path: Array | None = None) -> Self:
        """Keeps `count` [B] staged tokens: those at the nodes `path` [B, T], or the first ones."""
        cache = self
        if path is not None:
            kept = [self.layer(i)._keep(path) for i in range(len(self.keys))]
            cache = self.with_layers(kept)
        return dataclasses.replace(cache, length=self.length + count)

    def _keep(self, path: Array) -> tuple[Array, Array]:
        slots = self._slots(self.length[:, None] + path)[:, None, :, None]
        return self.stage(
            *(jnp.take_along_axis(leaf, slots, axis=2) for leaf in (*self.keys, *self.values))
        )

    def rewind(self, to: Cache) -> Self:
        """Returns `to`, an earlier value, in the buffers of this cache, to update them in place."""
        return dataclasses.replace(self, length=to.length)
