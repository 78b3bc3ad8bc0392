"""`BranchCache`: keys and values of a text, and of branches that leave it, for training drafters.

    text      a   b   c   d   e   f              read in one pass
    branches          +-- c1  c2                 at anchor 3: sees a, b, c and itself
                              +-- e1  e2         at anchor 5: sees a ... e and itself

Decoding drafts one branch at a time, after a text that grows.  Training reads many branches of the
same text in one pass, so that each position of a text trains a draft.  Nothing is committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, Self

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding


class Memory(Protocol):
    """The interface of a layer's cache that attention uses."""

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Returns all keys and values [B, K, S, D], with new ones [B, K, N, D] staged."""
        ...


@struct.dataclass
class BranchCache:
    """The cache for reading a text (`text`), then its branches (`leaving`), one pass per `go_on`.

    The tokens of a pass are [B, A * W]: W tokens of each of A branches, branch after branch.
    """

    keys: tuple[Array, ...]  # a layer: [B, K, S, D]; () before the text is read
    values: tuple[Array, ...]
    positions: Array  # [B, M] of the text, or of all branch tokens, the coming pass included
    leaves: Array  # [B, A] how many tokens of the text each branch sees; [B, 0] for the text
    num_text: int = struct.field(pytree_node=False)  # T
    width: int = struct.field(pytree_node=False)  # W, or T for the text
    # On a mesh XLA chooses how keys and values lie.
    sharding: NamedSharding | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def text(cls, rows: int, length: int) -> Self:
        """Returns the cache before a pass over texts [B, T], which is causal."""
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        return cls((), (), positions, jnp.zeros((rows, 0), jnp.int32), length, length)

    def leaving(self, leaves: Array, positions: Array) -> Self:
        """Returns the cache before the first pass over branches, after the text was read.

        Args:
          leaves: [B, A] the tokens of the text that each branch sees.
          positions: [B, A, W] of the branches' tokens.
        """
        flat = positions.reshape(len(positions), -1)
        return dataclasses.replace(self, positions=flat, leaves=leaves, width=positions.shape[2])

    def go_on(self, positions: Array) -> Self:
        """Returns the cache before a next pass over the same branches, at `positions` [B, A, W]."""
        flat = positions.reshape(len(positions), -1)
        return dataclasses.replace(self, positions=jnp.concatenate([self.positions, flat], axis=1))

    def layer(self, index: int) -> Self:
        """Returns the cache of a single layer."""
        if not self.keys:
            return self
        return dataclasses.replace(self, keys=(self.keys[index],), values=(self.values[index],))

    def with_layers(self, layers: Sequence[tuple[Array, Array]]) -> Self:
        """Returns this cache with the keys and values of each layer, as `stage` returned them."""
        keys, values = zip(*layers, strict=True)
        return dataclasses.replace(self, keys=keys, values=values)

    def next_positions(self, width: int) -> Array:
        """Returns [B, N] the positions of the `width` tokens of the coming pass."""
        return self.positions[:, self.positions.shape[1] - width :]

    def stage(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Stages new keys and values [B, K, N, D] of one layer; returns all, [B, K, S + N, D]."""
        if not self.keys:
            return keys, values
        keys, values = (
            jnp.concatenate([old[0], new.astype(old[0].dtype)], axis=2)
            for old, new in ((self.keys, keys), (self.values, values))
        )
        return keys, values

    def visible(
        self,
        positions: Array,
        mask: Array | None = None,
        window: int | None = None,
        chunked: bool = False,
    ) -> Array | None:
        """Returns [B, N, S + N] bool: the slots that each token of the coming pass attends to.

        None stands for causal attention to the text, within the window if there is one.

        Args:
          positions: [B, N] of the coming tokens.
          mask: [1, W, W] bool, which tokens of its branch each one attends to; None: causal.
          window, chunked: as for `KVCache.visible`.
        """
        if not self.keys:
            if window is None or not chunked:
                return None
            distance = positions[:, :, None] - positions[:, None]
            return (distance >= 0) & (distance <= positions[:, :, None] % window)
        count = positions.shape[1]
        slot = jnp.arange(self.num_text)
        text = slot < jnp.repeat(self.leaves, self.width, axis=1)[:, :, None]
        number = jnp.arange(self.positions.shape[1])
        branch, within = number % count // self.width, number % self.width
        new = slice(len(number) - count, None)
        same = branch[new, None] == branch
        inside = jnp.tril(jnp.ones((self.width,) * 2, bool)) if mask is None else mask[0]
        # Earlier passes over a branch are seen whole, and the coming one by the mask.
        earlier = number < len(number) - count
        same = (same & (earlier | inside[within[new, None], within]))[None]
        if window is not None:
            start = positions // window * window if chunked else positions - window + 1
            text = text & (slot >= start[:, :, None])
            same = same & (self.positions[:, None] >= start[:, :, None])
        same = jnp.broadcast_to(same, (len(positions), *same.shape[1:]))
        return jnp.concatenate([text, same], axis=2)
