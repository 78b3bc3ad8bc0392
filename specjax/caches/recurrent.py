"""The cache of a recurrent model: the state after the committed tokens, and, between pass and commit, one a token.

    state            s3                    length 3
    stage            s3 | s4 s5 s6 s7      the states after each of the four staged tokens
    commit(2)        s5                    length 5

A state has forgotten how it came about, so nothing can be taken back and no path of a tree can be picked: what is
needed of a pass is kept until the commit says which.  A sliding window or the inputs of a short convolution are such
states too: a ring buffer is one leaf of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.contract import Cache, refuse_path


@struct.dataclass
class RecurrentCache(Cache):
    """Holds any pytree of states; it commits the beginning of a chain, and no path."""

    state: Any  # leaves [B, ...]
    length: Array  # [B] int32
    staged: Any = None  # leaves [B, N, ...]

    @classmethod
    def create(cls, state: Any) -> RecurrentCache:
        """From the state before the first token, leaves [B, ...]."""
        return cls(state, jnp.zeros(len(jax.tree.leaves(state)[0]), jnp.int32))

    def stage(self, states: Any) -> RecurrentCache:
        """With the states after each of the N tokens of a pass, leaves [B, N, ...]."""
        return RecurrentCache(self.state, self.length, states)

    def scan(
        self, step: Callable[[Any, Any], tuple[Any, Any]], inputs: Any
    ) -> tuple[Any, RecurrentCache]:
        """Run `step(state, input) -> (state, output)` along axis 1 of `inputs` [B, N, ...], and stage what it leaves.

        Returns:
          The outputs [B, N, ...], and the cache.
        """

        def keep(state, x):
            state, output = step(state, x)
            return state, (state, output)

        def swap(tree):
            return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)

        states, outputs = swap(jax.lax.scan(keep, self.state, swap(inputs))[1])
        return outputs, self.stage(states)

    def commit(self, count: Array, path: Array | None = None) -> RecurrentCache:
        """The state after the first `count` [B] staged tokens; where that is 0, the state as it was."""
        refuse_path(path)
        if self.staged is None:
            raise ValueError(
                "nothing is staged: apply must return cache.stage(states), or what cache.scan returned"
            )

        def keep(before, after):
            every = jnp.concatenate([before[:, None], after.astype(before.dtype)], axis=1)
            return jax.vmap(lambda row, n: row[n])(every, count)

        return RecurrentCache(jax.tree.map(keep, self.state, self.staged), self.length + count)

    def rewind(self, to: RecurrentCache) -> RecurrentCache:
        """`to` itself: states are small, and copied."""
        return to
