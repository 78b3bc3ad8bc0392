"""The target's likeliest tokens one by one, and all others as one outcome.

A target's distribution over V tokens is cut to its k likeliest tokens and one further outcome, the
tail, which has the mass of all other tokens.  The draft's is cut in the same way, at the target's
tokens, so every divergence works on k + 1 outcomes instead of V:

    p = (p_1, ..., p_k, 1 - sum p_i)        q = (q_1, ..., q_k, 1 - sum q_i)

Joining outcomes never raises a divergence.  The loss on k + 1 outcomes is therefore at most the
loss on V tokens, and sum min(p, q) at least alpha.  The loss does not see how the draft divides the
tail among its tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

_NEVER = -1e30  # a logit whose token has no probability; finite, so that gradients are
_LEAST = 1e-7  # of the tail's mass, which a sum of float32 does not resolve any further


@struct.dataclass
class Top:
    """The likeliest tokens of distributions."""

    ids: Array  # [C, k] distinct tokens, the likeliest first
    log_probs: Array  # [C, k] of the whole distribution; -inf for tokens of no probability


def top_of(log_probs: Array, k: int) -> Top:
    """Returns the k likeliest tokens of log-probabilities [C, V]; ties go to the lower id."""
    values, ids = jax.lax.top_k(log_probs, k)
    return Top(ids, values)


def folded(top: Top, draft: Array) -> tuple[Array, Array]:
    """Returns log-probabilities of the k tokens and of the tail, of the target and of the draft.

    Args:
      top: of the target, [C, k].
      draft: the draft's log-probabilities [C, V].

    Returns:
      The target's and the draft's, [C, k + 1] each; [C, k] if k is V, since the tail is empty then.
    """
    near = jnp.take_along_axis(draft, top.ids, axis=1)
    if top.ids.shape[1] == draft.shape[1]:
        return top.log_probs, near
    mass = jnp.maximum(1 - jnp.exp(top.log_probs).sum(1, keepdims=True), _LEAST)
    rows = jnp.arange(len(draft))[:, None]
    # Not 1 - sum q_i, whose logarithm has no exact gradient where it is small.
    rest = jax.nn.logsumexp(draft.at[rows, top.ids].set(_NEVER), axis=1, keepdims=True)
    return (
        jnp.concatenate([top.log_probs, jnp.log(mass)], axis=1),
        jnp.concatenate([near, rest], axis=1),
    )
