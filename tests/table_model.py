"""`TableModel`: a target of a few operations, whose logits are exact in float32.

    h[n] = sum over the tokens m that n sees, of age a = position[n] - position[m] <= MEMORY,
           of 2^-a embedding[token[m]], plus place[position[n] % PLACES]
    logits[n] = h[n] head

The tables hold small integers, so every sum is exact in whatever order it is added: texts, caches
and logits of different programs are compared for equality, and not within a tolerance.  A token
that is staged at a wrong position, seen through a wrong mask, or committed to a wrong slot changes
`h`.  The cache holds the tokens themselves, with their positions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.caches import visible_slots
from specjax.contract import Cache, Model
from specjax.types import ModelOutput

PLACES = 5
WIDTH = 32


@struct.dataclass
class TokenCache(Cache):
    """The tokens of each row and their positions; commits paths, and keeps scratch."""

    tokens: Array  # [B, S] int32
    positions: Array  # [B, S] int32
    length: Array  # [B] int32

    commits_paths = True
    keeps_scratch = True

    def stage(self, tokens: Array, positions: Array) -> Self:
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        return dataclasses.replace(
            self,
            tokens=put(self.tokens, tokens, self.length),
            positions=put(self.positions, positions, self.length),
        )

    def commit(self, count: Array, path: Array | None = None) -> Self:
        cache = self
        if path is not None:
            at = self.length[:, None] + path
            kept = (jnp.take_along_axis(x, at, axis=1) for x in (self.tokens, self.positions))
            cache = self.stage(*kept)
        return dataclasses.replace(cache, length=self.length + count)

    def truncate(self, count: Array) -> Self:
        return dataclasses.replace(self, length=count)

    def rewind(self, to: Cache) -> Self:
        return dataclasses.replace(self, length=to.length)


@dataclasses.dataclass(frozen=True)
class TableModel(Model):
    """See the top of the file.  A draft with a shorter `memory` than its target's agrees with it
    often, and not always."""

    vocab_size: int
    memory: int = 3
    max_positions: int = 64
    # 0 is the embedding, and k > 0 the hidden state turned by k - 1 columns.
    num_taps: int = 4

    reads_trees = True

    def init_cache(self, batch: int, size: int) -> TokenCache:
        empty = jnp.zeros((batch, size), jnp.int32)
        return TokenCache(empty, empty, jnp.zeros(batch, jnp.int32))

    def apply(
        self,
        params: Any,
        tokens: Array,
        positions: Array,
        cache: Cache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        rows, width = tokens.shape
        positions = jnp.broadcast_to(positions, tokens.shape)
        text = self.init_cache(rows, width) if cache is None else cache
        assert isinstance(text, TokenCache)
        text = text.stage(tokens, positions)
        seen = visible_slots(text.length, width, text.tokens.shape[1], mask)
        age = positions[:, :, None] - text.positions[:, None]
        seen &= (age >= 0) & (age <= self.memory)
        weights = jnp.where(seen, jnp.exp2(-age.astype(jnp.float32)), 0.0)
        place = params["place"][positions % PLACES]
        hidden = jnp.einsum("bns,bse->bne", weights, params["embedding"][text.tokens]) + place
        features = [
            jnp.roll(hidden, tap - 1, axis=-1) if tap else params["embedding"][tokens]
            for tap in taps
        ]
        return ModelOutput(
            hidden @ params["head"]["kernel"],
            hidden,
            None if cache is None else text,
            jnp.concatenate(features, axis=-1) if features else None,
        )


@functools.cache
def tables(vocab_size: int, seed: int = 0, flips: float = 0.0) -> Any:
    """Parameters of a `TableModel`.

    Args:
      vocab_size: V.
      seed: of the integers.
      flips: this share of the head is drawn anew, for a draft that agrees often.
    """
    rng, others = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    embedding = rng.integers(-4, 5, (vocab_size, WIDTH))
    place = rng.integers(-2, 3, (PLACES, WIDTH))
    head = rng.integers(-8, 9, (WIDTH, vocab_size))
    head = np.where(others.random(head.shape) < flips, others.integers(-8, 9, head.shape), head)
    return {
        "embedding": jnp.asarray(embedding, jnp.float32),
        "place": jnp.asarray(place, jnp.float32),
        "head": {"kernel": jnp.asarray(head / 32, jnp.float32)},
    }
