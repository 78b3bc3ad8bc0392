"""Acceptance imposed on any chain proposer, for weights that no draft was trained for.

The proposer does all its work; then each guess is replaced by the token that the target is known to say, with the given
probability, and by another token otherwise.  So the costs are real, the acceptance is what was asked for, and the text
is still the target's own: a run is checked against plain decoding like any other.  Coins belong to a row and a place,
so that every contestant meets the same luck, and rows part ways as real ones do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import tree
from specjax.contract import Context, Proposer
from specjax.metrics import expected_accepted_length
from specjax.types import Block, Proposal

_TOSSES = 512


def coins(rows: int, new: int, rate: float, lookaheads: Sequence[int]) -> np.ndarray:
    """[rows, new] bool: is the guess for this new token right?

    A text of some tens of tokens has luck of its own, so of many independent tosses that one is taken in which chains
    of these lookaheads come closest to the acceptance and the length that the rate promises.  Rows differ among each
    other as they fall.
    """
    tosses = np.random.default_rng(0).random((_TOSSES // rows + 1, rows, new)) < rate

    def luck(toss: np.ndarray) -> float:
        total = 0.0
        for gamma in lookaheads:
            passes, accepted, tested = np.sum([walk(right, gamma) for right in toss], axis=0)
            tau = toss.size / passes
            total += (accepted / tested - rate) ** 2 + (
                tau / expected_accepted_length(rate, gamma) - 1
            ) ** 2
        return total

    return min(tosses, key=luck)


def walk(right: np.ndarray, gamma: int) -> tuple[int, int, int]:
    """Passes of the target, accepted and judged guesses of a row whose guesses are right [new] there."""
    new, runs = len(right), [0] * (len(right) + 1)
    for place in reversed(range(new)):
        runs[place] = runs[place + 1] + 1 if right[place] else 0
    at = passes = accepted = tested = 0
    while at < new:
        kept = min(runs[at], gamma)
        count = min(kept + 1, new - at)
        at, passes = at + count, passes + 1
        accepted, tested = accepted + min(kept, count), tested + min(kept + 1, gamma, count)
    return passes, accepted, tested


@struct.dataclass
class Script:
    """Parameters of `Imposed`."""

    inner: Any
    text: Array  # [B, L] prompt and what the target says behind it
    right: Array  # [B, L] bool


@dataclasses.dataclass(frozen=True)
class Imposed(Proposer):
    """`inner`, a chain, with its drafts replaced.  They are a function of the text: point masses."""

    inner: Proposer
    vocab_size: int
    is_chain = True
    point_mass = True

    def __post_init__(self):
        if not self.inner.is_chain or self.inner.shares_cache:
            raise ValueError(
                f"acceptance is imposed on chains with a state of their own, and not on a {type(self.inner).__name__}"
            )
        self.declare(
            num_nodes=self.inner.num_nodes, max_depth=self.inner.max_depth, taps=self.inner.taps
        )

    def init(self, params: Script, prompt: Block, capacity: int) -> Any:
        guessed = jnp.zeros((len(prompt.count), self.num_nodes), jnp.int32)
        return self.inner.init(params.inner, prompt, capacity), prompt.count, guessed

    def propose(self, params: Script, state: Any, context: Context) -> tuple[Proposal, Any]:
        proposal, inner = self.inner.propose(params.inner, state[0], context)
        place = state[1][:, None] + jnp.arange(1, self.num_nodes)
        place = jnp.minimum(place, params.text.shape[1] - 1)
        said, right = (jnp.take_along_axis(x, place, axis=1) for x in (params.text, params.right))
        guesses = jnp.where(right, said, (said + 1) % self.vocab_size)
        # What the inner one guessed must not be removed as dead code.
        guesses, guessed = jax.lax.optimization_barrier((guesses, proposal.tokens))
        tokens = jnp.concatenate([context.pending[:, None], guesses], axis=1)
        parent = jnp.broadcast_to(tree.chain(self.num_nodes), tokens.shape)
        return Proposal(tokens, parent, point_mass=True), (inner, state[1], guessed)

    def observe(self, params: Script, state: Any, block: Block) -> Any:
        """The inner one is told that its own guesses were kept: what is right it need not read again."""
        inner, length, guessed = state
        told = jnp.concatenate([block.tokens[:, :1], guessed[:, 1:]], axis=1)
        kept = dataclasses.replace(block, tokens=told)
        return self.inner.observe(params.inner, inner, kept), length + block.count, guessed
