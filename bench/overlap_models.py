"""Models whose acceptance and time per pass are given, to measure overlap against its model.

The target's next token is a function of the position.  The draft's best token is right with one
probability, and its second best, where the best is wrong, with another; both are drawn once for
each position.  Each pass sleeps, whatever the number of rows and tokens, as on a chip that has to
read its weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench.sleeping import late
from specjax.contract import Cache, Model
from specjax.overlap import UnreadCache
from specjax.types import Arrays, ModelOutput

VOCAB = 64


@dataclasses.dataclass(frozen=True)
class Timed(Model):
    """`params` are [L] int32: the best token after each position; and [L], the second best."""

    milliseconds: float
    max_positions: int
    vocab_size: int = VOCAB
    reads_trees = True

    def init_cache(self, batch: int, size: int) -> UnreadCache:
        return UnreadCache(jnp.zeros(batch, jnp.int32))

    def apply(
        self,
        params: Arrays,
        tokens: Array,
        positions: Array,
        cache: Cache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        best, second = params
        at = jnp.minimum(positions, len(best) - 1)
        logits = 2 * jax.nn.one_hot(best[at], VOCAB) + jax.nn.one_hot(second[at], VOCAB)
        # It gets a token, so that passes wait for each other.
        zero = late(tokens[0, 0], self.milliseconds)
        return ModelOutput(logits + zero, jnp.zeros((*tokens.shape, 0)), cache)


def texts(
    length: int, alpha: float, second: float, seed: int = 0
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The parameters of a target and of its draft, for texts of `length` tokens."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCAB, length)
    right, next_right = rng.random(length) < alpha, rng.random(length) < second
    wrong, other = (text + 1) % VOCAB, (text + 2) % VOCAB
    best = np.where(right, text, wrong)
    after = np.where(~right & next_right, text, other)

    def pair(*rows: np.ndarray) -> tuple[Array, Array]:
        first, last = (jnp.asarray(row, jnp.int32) for row in rows)
        return first, last

    return pair(text, other), pair(best, after)
