"""Acceptance imposed on any chain proposer, for weights that no draft was trained for.

The proposer does all its work; then each guess is replaced by the token that the target is known to say, with the given
probability, and by another token otherwise.  So the costs are real, the acceptance is what was asked for, and the text
is still the target's own: a run is checked against plain decoding like any other.  Coins are tossed by position, so
that every contestant meets the same luck.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.types import Block, Proposal, Proposer


def coins(length: int, rate: float, seed: int = 0) -> np.ndarray:
    """[length] bool: is the guess for this position right?"""
    return np.random.default_rng(seed).random(length) < rate


@struct.dataclass
class Script:
    """Parameters of `Imposed`."""

    inner: Any
    text: Array  # [B, L] prompt and what the target says behind it
    right: Array  # [L] bool


@dataclasses.dataclass(frozen=True)
class Imposed:
    """`inner`, with its guesses replaced."""

    inner: Proposer
    vocab_size: int
    is_chain = True

    @property
    def num_nodes(self) -> int:
        return self.inner.num_nodes

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    def init(self, params: Script, prompt: Block, capacity: int) -> Any:
        return self.inner.init(params.inner, prompt, capacity), prompt.count

    def propose(self, params: Script, state: Any, pending: Array, draw: Any, warp: Any) -> tuple[Proposal, Any]:
        proposal, inner = self.inner.propose(params.inner, state[0], pending, draw, warp)
        place = state[1][:, None] + jnp.arange(1, self.num_nodes)
        place = jnp.minimum(place, params.text.shape[1] - 1)
        said = jnp.take_along_axis(params.text, place, axis=1)
        guesses = jnp.where(params.right[place], said, (said + 1) % self.vocab_size)
        # What the inner one guessed must not be removed as dead code.
        guesses, _ = jax.lax.optimization_barrier((guesses, proposal.tokens))
        tokens = jnp.concatenate([pending[:, None], guesses], axis=1)
        parent = jnp.broadcast_to(tree.chain(self.num_nodes), tokens.shape)
        return Proposal(tokens, parent, None), (inner, state[1])

    def observe(self, params: Script, state: Any, block: Block) -> Any:
        return self.inner.observe(params.inner, state[0], block), state[1] + block.count
