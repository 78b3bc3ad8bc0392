"""Commits a step: tokens cut at EOS and limit, their log-probabilities, and the counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specjax import tree
from specjax._internal.platforms import platform_of_shapes
from specjax._internal.row_writes import write
from specjax.decoding.logprobs import Logprobs
from specjax.sampling import Drawn
from specjax.types import ABSENT, DecodeState, Stats, StepInfo


def emit(
    state: DecodeState, accepted: Array, num_accepted: Array, next_token: Array
) -> tuple[Array, Array, Array]:
    """Returns the accepted drafts and then the next token, cut at an EOS and at the limit.

    accepted r a b b     num_accepted 2, next_token x     ->  emitted a b x .    count 3

    Args:
      state: before the step.
      accepted: [B, D + 1] tokens of the accepted path, root first, padded with the last of them.
      num_accepted: [B] accepted drafts.
      next_token: [B] the token after them.

    Returns:
      Emitted tokens [B, D + 1], how many of them count [B], and whether a row is done [B].
    """
    index = jnp.arange(accepted.shape[1])
    drafts = jnp.concatenate([accepted[:, 1:], next_token[:, None]], axis=1)
    emitted = jnp.where(index == num_accepted[:, None], next_token[:, None], drafts)
    count = jnp.minimum(num_accepted + 1, state.limit - state.length)
    ends = (emitted[..., None] == state.eos[:, None]).any(-1) & (index < count[:, None])
    count = jnp.where(ends.any(1), jnp.argmax(ends, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.where(state.done, 0, count)
    done = state.done | ends.any(1) | (state.length + count >= state.limit)
    return emitted, count, done


def record(
    state: DecodeState,
    path: Array,
    emitted: Array,
    logits: Array,
    judged: Array | Drawn,
    num_logprobs: int | None,
) -> Logprobs | None:
    """Returns the buffers `state.logprobs` with the log-probabilities of a step's emitted tokens.

    Args:
      state: before the step.
      path: [B, D + 1] the accepted nodes, root first; emitted token i was drawn after node i.
      emitted: [B, D + 1] tokens.
      logits: [B, N, V] the target's logits after each node.
      judged: the same after warping, or what was drawn from them.
      num_logprobs: top tokens to record; None: there are no buffers.
    """
    if num_logprobs is None:
        return None
    measured = Logprobs.measure(logits, judged, path, emitted, num_logprobs)
    return jax.tree.map(
        lambda buffer, new: write(buffer, new, state.length), state.logprobs, measured
    )


def count(stats: Stats, info: StepInfo, live: Array) -> Stats:
    """Adds a step to `stats`; `live` [B] bool: whether the row was not done before the step."""
    asked = jax.vmap(tree.asked)(info.proposal.parent, info.path, info.num_accepted)
    tested = jnp.minimum(asked.sum(1, dtype=jnp.int32), info.count)
    proposed = (info.proposal.parent != ABSENT).sum(1, dtype=jnp.int32)
    added = (  # in the order of the fields
        live.astype(jnp.int32),
        info.count,
        jnp.minimum(info.num_accepted, info.count),
        tested,
        jnp.where(live, proposed, 0),
        (live & (proposed > 0)).astype(jnp.int32),
    )
    if platform_of_shapes() == "gpu":
        # Of a single row XLA:GPU joins no additions, unless they read one array of several numbers.
        added = tuple(jax.lax.optimization_barrier(jnp.stack(added)))
    before = (getattr(stats, field.name) for field in dataclasses.fields(Stats))
    return Stats(*(old + new for old, new in zip(before, added, strict=True)))
