"""`Waiting`: committed tokens that a drafter reads later, since the steps before had no drafts."""

from __future__ import annotations

import dataclasses
from typing import Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax._internal.row_writes import write
from specjax.types import Block

TOKENS = 32
"""The tokens that wait.  One pass over so many takes a CPU little longer than one over a few."""


@struct.dataclass
class Waiting:
    """The tokens of each row, with the target's hidden states at them, in the order of the text."""

    tokens: Array  # [B, W] int32
    hidden: Array  # [B, W, E]
    features: Array | None  # [B, W, sum E]
    count: Array  # [B] int32: how many wait

    @staticmethod
    def width(of_step: int) -> int:
        """Returns W, if a step commits up to `of_step` tokens."""
        return TOKENS + of_step

    @classmethod
    def empty(cls, prompt: Block, of_step: int) -> Self:
        """Returns buffers for rows like those of a prompt, without tokens."""

        def buffer(like: Array) -> Array:
            return jnp.zeros((len(like), cls.width(of_step), *like.shape[2:]), like.dtype)

        features = None if prompt.features is None else buffer(prompt.features)
        return cls(
            buffer(prompt.tokens), buffer(prompt.hidden), features, jnp.zeros_like(prompt.count)
        )

    @property
    def block(self) -> Block:
        """The tokens, as a proposer reads them."""
        return Block(self.tokens, self.hidden, self.count, self.features)

    def is_full(self, of_step: int) -> Array:
        """Returns [] bool: whether a row may lack space for the tokens of another step."""
        return (self.count + of_step > self.tokens.shape[1]).any()

    def room(self) -> Array:
        """Returns [] int32: how many tokens more every row has space for."""
        return (self.tokens.shape[1] - self.count).min()

    def after(self, block: Block, waits: Array) -> Self:
        """Returns the buffers with a committed block after the others, if it `waits` [] bool."""

        def written(old: Array, new: Array) -> Array:
            return write(old, new.astype(old.dtype), self.count)

        features = self.features
        if features is not None and block.features is not None:
            features = written(features, block.features)
        return dataclasses.replace(
            self,
            # What stands behind the count is overwritten later.
            tokens=written(self.tokens, block.tokens),
            hidden=written(self.hidden, block.hidden),
            features=features,
            count=self.count + jnp.where(waits, block.count, 0),
        )

    def emptied(self, if_read: Array) -> Self:
        """Returns the buffers without tokens where they were read, [] bool."""
        return dataclasses.replace(self, count=jnp.where(if_read, 0, self.count))
