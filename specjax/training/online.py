"""Learning inside speculation: draft, verify, and learn from what the verification says.

The target's pass over a proposal gives its distribution after *every* guess, accepted or not, on the very text that the
draft wrote.  These are labels of the kind that a draft needs most, and they are there anyway: no second pass of the
target, no server, no file.

    text      p p p p a a b c c c d d          guesses of each step hang below its root; the draft reads text and
                     \\g g  \\g g              guesses in one pass under a mask, and learns at every root and guess

Prior work: Liu et al. 2023, Online Speculative Decoding, arXiv 2310.07177, which learns at the first wrong guesses.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.decoding import Decoder
from specjax.models import LinenModel
from specjax.types import DecodeState, Params


@struct.dataclass
class Rollout:
    """S steps of speculation."""

    text: Array  # [B, L] tokens at the end
    root: Array  # [B, S] slot of each step's pending token
    guesses: Array  # [B, S, gamma]
    logits: Array  # [B, S, gamma + 1, V] the target's, warped, after the root and after each guess
    emitted: Array  # [B]


def roll_out(decoder: Decoder, params: Params, state: DecodeState, steps: int) -> Rollout:
    """Speculate for so many steps, with a proposer of chains.  No gradient flows into it."""

    def step(state, _):
        after, info = decoder.step(params, state)
        return after, (state.length - 1, info.proposal.tokens[:, 1:], info.logits)

    params = jax.lax.stop_gradient(params)
    after, seen = jax.lax.scan(step, state, None, steps)
    root, guesses, logits = (jnp.swapaxes(x, 0, 1) for x in seen)
    return Rollout(
        after.tokens[:, : decoder.capacity],
        root,
        guesses,
        logits,
        after.stats.emitted - state.stats.emitted,
    )


def read_branches(model: LinenModel, params: Any, rollout: Rollout) -> Array:
    """The features [B, S, gamma + 1, E] of a draft at every root and guess, in one pass over all of them."""
    rows, length = rollout.text.shape
    _, steps, gamma = rollout.guesses.shape
    place, step, depth = (
        jnp.arange(length),
        jnp.arange(steps * gamma) // gamma,
        jnp.arange(steps * gamma) % gamma + 1,
    )
    root = rollout.root[:, step]  # [B, steps * gamma]
    text_sees = jnp.pad(place[:, None] >= place, ((0, 0), (0, steps * gamma)))
    same_chain = (step[:, None] == step) & (depth[:, None] >= depth)
    guesses_see = jnp.concatenate(
        [root[:, :, None] >= place, jnp.broadcast_to(same_chain, (rows, *same_chain.shape))], axis=2
    )
    mask = jnp.concatenate(
        [jnp.broadcast_to(text_sees, (rows, *text_sees.shape)), guesses_see], axis=1
    )
    tokens = jnp.concatenate([rollout.text, rollout.guesses.reshape(rows, -1)], axis=1)
    positions = jnp.concatenate([jnp.broadcast_to(place, (rows, length)), root + depth], axis=1)
    hidden = model.apply(params, tokens, positions, None, mask).hidden
    at_roots = jnp.take_along_axis(hidden[:, :length], rollout.root[:, :, None], axis=1)
    at_guesses = hidden[:, length:].reshape(rows, steps, gamma, -1)
    return jnp.concatenate([at_roots[:, :, None], at_guesses], axis=2)
