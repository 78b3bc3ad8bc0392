"""The cache of a recurrent model: the state after the committed tokens, and after each staged one.

    state            s3                    length 3
    stage            s3 | s4 s5 s6 s7      the states after each of the four staged tokens
    commit(2)        s5                    length 5

A token cannot be removed from a state, so a pass keeps the state after each of its tokens, and the
commit picks one of them.  Such a cache cannot commit a path through a tree.  A sliding window or
the last inputs of a short convolution can be part of the state too, as a ring buffer in a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.contract import Cache, refuse_path

_Tree = TypeVar("_Tree")
_StateT = TypeVar("_StateT")
_InputT = TypeVar("_InputT")
_OutputT = TypeVar("_OutputT")


@struct.dataclass
class RecurrentCache(Cache, Generic[_StateT]):
    """Holds any pytree of states.  It commits the first tokens of a chain, not a path of a tree."""

    state: _StateT  # leaves [B, ...]
    length: Array  # [B] int32
    staged: _StateT | None = None  # leaves [B, N, ...]

    @classmethod
    def create(cls, state: _StateT) -> RecurrentCache[_StateT]:
        """Makes a cache from the state before the first token, leaves [B, ...]."""
        return cls(state, jnp.zeros(len(jax.tree.leaves(state)[0]), jnp.int32))

    def stage(self, states: _StateT) -> RecurrentCache[_StateT]:
        """Stages the states after each of the N tokens of a pass, leaves [B, N, ...]."""
        return RecurrentCache(self.state, self.length, states)

    def scan(
        self, step: Callable[[_StateT, _InputT], tuple[_StateT, _OutputT]], inputs: _InputT
    ) -> tuple[_OutputT, RecurrentCache[_StateT]]:
        """Runs `step(state, input) -> (state, output)` along axis 1 of `inputs` [B, N, ...].

        The state after each input is staged.

        Returns:
          The outputs [B, N, ...], and the cache.
        """

        def keep(state: _StateT, x: _InputT) -> tuple[_StateT, tuple[_StateT, _OutputT]]:
            state, output = step(state, x)
            return state, (state, output)

        def swap(tree: _Tree) -> _Tree:
            return jax.tree.map(lambda x: x.swapaxes(0, 1), tree)

        states, outputs = swap(jax.lax.scan(keep, self.state, swap(inputs))[1])
        return outputs, self.stage(states)

    def commit(self, count: Array, path: Array | None = None) -> RecurrentCache[_StateT]:
        """Returns the cache after the first `count` [B] staged tokens, which may be none."""
        refuse_path(path)
        if self.staged is None:
            raise ValueError(
                "nothing is staged: apply must return cache.stage(states), or the cache of "
                "cache.scan"
            )

        def keep(before: Array, after: Array) -> Array:
            every = jnp.concatenate([before[:, None], after.astype(before.dtype)], axis=1)
            return jax.vmap(lambda row, n: row[n])(every, count)

        return RecurrentCache(jax.tree.map(keep, self.state, self.staged), self.length + count)

    def rewind(self, to: Cache) -> Self:
        """Returns `to` itself: states are small, so a copy costs little."""
        assert isinstance(to, type(self))
        return to
