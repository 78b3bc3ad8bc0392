"""The expected accepted length of a chain, exactly, and with a gradient.

Speculative sampling keeps the guesses x_1 ... x_k with probability prod_i min(p, q)(x_i | x_<i).  For the number N of
guesses kept out of gamma,

    E[N] = sum_k P(N >= k) = sum_k E_{x ~ target} [ prod_{i<k} min(1, q(x_i | x_<i) / p(x_i | x_<i)) * alpha_k ]

with alpha_k = sum_v min(p, q)(v | x_<k): the last of the k factors is summed over its token, the earlier ones are
weighed by p.  So a mean over text that the *target* wrote, with the settings that it serves, is unbiased, and every
factor has a gradient: neither guesses of the draft nor a score function are needed.  All anchors of a text share one
pass, since q(x_i | x_<i) does not depend on where the chain began.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from specjax.sampling import Sampling
from specjax.training.divergences import acceptance, forward_kl
from specjax.training.losses import log_draft, log_target
from specjax.training.precision import mixed_dot_general


def statistics(
    logits: Array, labels: Array, target_hidden: Array, target_head: Array, sampling: Sampling | None = None
) -> Array:
    """For `chunked_rows`: [C, 3], the forward KL, min(1, q/p) of the label, and alpha.  Shapes as in `losses.against`,
    labels [C]."""
    target = log_target(mixed_dot_general(target_hidden, target_head, (((1,), (0,)), ((), ()))), sampling)
    draft = log_draft(logits, sampling)
    p, q = (jnp.take_along_axis(x, labels[:, None], axis=1)[:, 0] for x in (target, draft))
    return jnp.stack([forward_kl(target, draft), jnp.exp(jnp.minimum(0, q - p)), acceptance(target, draft)], axis=1)


def expected_accepted_length(ratio: Array, alpha: Array, drawn: Array, num_drafts: int) -> tuple[Array, Array]:
    """E[N] of chains from every place, and which places count.

    Args:
      ratio: [B, T] min(1, q/p) of the token that follows.
      alpha: [B, T] sum_v min(p, q).
      drawn: [B, T] whether the target drew the token that follows; a chain needs `num_drafts` of these.
      num_drafts: gamma, at most T.

    Returns:
      Lengths in [0, gamma] and a mask of 0 and 1, both [B, T - gamma + 1].
    """
    width = ratio.shape[1] - num_drafts + 1
    reached = counts = jnp.ones_like(ratio[:, :width])
    length = jnp.zeros_like(reached)
    for k in range(num_drafts):
        here = slice(k, k + width)
        length = length + reached * alpha[:, here]
        reached = reached * ratio[:, here]
        counts = counts * (drawn[:, here] > 0)
    return length, counts
