"""Trains a draft inside speculation: draft, verify, and learn from the verification.

The target's pass over a proposal gives its distribution after *every* draft token, accepted or
rejected.  So the draft model learns on its own drafts, as in use, and the labels cost no additional
pass of the target.

    text      p p p p a a b c c c d d       p: prompt; a, b, c, d: tokens that each step committed
                     \\x x  \\x x            x: draft tokens of the steps a and c

The draft tokens of a step follow its root, the last token that was committed before it.  The draft
model reads the text and all draft tokens in one pass under a mask, and learns at every root and
every draft token.

Prior work: Liu et al. 2023, Online Speculative Decoding, arXiv 2310.07177, which learns at the
first rejected drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import decoding
from specjax.models import LinenModel
from specjax.sampling import Sampling, make_key
from specjax.types import DecodeState, Params, Weights


@struct.dataclass
class Rollout:
    """The record of S steps of speculation."""

    text: Array  # [B, L] tokens after the last step
    root: Array  # [B, S] slot of each step's pending token
    drafts: Array  # [B, S, gamma] draft tokens
    logits: Array  # [B, S, gamma + 1, V] the target's, warped, after root and drafts
    emitted: Array  # [B] new tokens


def row_keys(seed: int, number: Array) -> Array:
    """Returns [B] keys of the rows of a batch; no other row of the run has the `number` [B]."""
    return jax.vmap(lambda n: jax.random.fold_in(make_key(seed), n))(number)


def begin(
    decoder: decoding.Decoder, params: Params, tokens: Array, prompt: int,
    settings: Mapping[str, float], keys: Array,
) -> DecodeState:  # fmt: skip
    """Returns the state after the first `prompt` of the tokens [B, T]; rows end at the capacity."""
    rows = len(tokens)
    return decoder.prefill(
        params,
        tokens[:, :prompt],
        np.full(rows, prompt, np.int32),
        limit=np.full(rows, decoder.capacity, np.int32),
        sampling=Sampling.create(rows, **settings),
        key=keys,
    )


def roll_out(decoder: decoding.Decoder, params: Params, state: DecodeState, steps: int) -> Rollout:
    """Decodes for `steps` steps with a proposer of chains, without gradients."""

    def step(state: DecodeState, _: None) -> tuple[DecodeState, tuple[Array, Array, Array]]:
        after, info = decoder.step(params, state)
        return after, (state.length - 1, info.proposal.tokens[:, 1:], info.logits)

    params = jax.lax.stop_gradient(params)
    after, records = jax.lax.scan(step, state, None, steps)
    root, drafts, logits = (jnp.swapaxes(x, 0, 1) for x in records)
    return Rollout(
        after.tokens[:, : decoder.capacity],
        root,
        drafts,
        logits,
        after.stats.emitted - state.stats.emitted,
    )


def read_branches(model: LinenModel, params: Weights, rollout: Rollout) -> Array:
    """Returns the draft model's hidden states at every root and every draft, computed in one pass.

    Returns:
      [B, S, gamma + 1, E].
    """
    rows, length = rollout.text.shape
    _, steps, gamma = rollout.drafts.shape
    slot = jnp.arange(length)
    step = jnp.arange(steps * gamma) // gamma
    depth = jnp.arange(steps * gamma) % gamma + 1
    root = rollout.root[:, step]  # [B, steps * gamma]
    text_sees = jnp.pad(slot[:, None] >= slot, ((0, 0), (0, steps * gamma)))
    same_chain = (step[:, None] == step) & (depth[:, None] >= depth)
    drafts_see = jnp.concatenate(
        [root[:, :, None] >= slot, jnp.broadcast_to(same_chain, (rows, *same_chain.shape))], axis=2
    )
    mask = jnp.concatenate(
        [jnp.broadcast_to(text_sees, (rows, *text_sees.shape)), drafts_see], axis=1
    )
    tokens = jnp.concatenate([rollout.text, rollout.drafts.reshape(rows, -1)], axis=1)
    positions = jnp.concatenate([jnp.broadcast_to(slot, (rows, length)), root + depth], axis=1)
    hidden = model.apply(params, tokens, positions, None, mask).hidden
    at_roots = jnp.take_along_axis(hidden[:, :length], rollout.root[:, :, None], axis=1)
    at_drafts = hidden[:, length:].reshape(rows, steps, gamma, -1)
    return jnp.concatenate([at_roots[:, :, None], at_drafts], axis=2)
