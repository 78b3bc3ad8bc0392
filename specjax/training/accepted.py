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

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.sampling import Sampling
from specjax.training.divergences import acceptance, forward_kl
from specjax.training.losses import log_draft, log_target
from specjax.training.precision import mixed_dot_general


def statistics(
    logits: Array,
    labels: Array,
    target_hidden: Array,
    target_head: Array,
    sampling: Sampling | None = None,
) -> Array:
    """For `chunked_rows`: [C, 3], the forward KL, min(1, q/p) of the label, and alpha.  Shapes as in `losses.against`,
    labels [C]."""
    target = log_target(
        mixed_dot_general(target_hidden, target_head, (((1,), (0,)), ((), ()))), sampling
    )
    draft = log_draft(logits, sampling)
    p, q = (jnp.take_along_axis(x, labels[:, None], axis=1)[:, 0] for x in (target, draft))
    return jnp.stack(
        [forward_kl(target, draft), jnp.exp(jnp.minimum(0, q - p)), acceptance(target, draft)],
        axis=1,
    )


def starts(drawn: Any, limit: Any, num_drafts: int) -> Any:
    """[B, T - gamma + 1] bool: a chain starts here and its places lie before the cut of its row.

    Arguments as in `expected_accepted_length`.
    """
    width = drawn.shape[1] - num_drafts + 1
    return (drawn[:, :width] > 0) & (np.arange(width) + num_drafts <= limit[:, None])


def expected_accepted_length(
    ratio: Array, alpha: Array, drawn: Array, limit: Array, num_drafts: int
) -> tuple[Array, Array]:
    """E[N] of the chains that start at each place, and which starts count.

    The decoder commits no guess behind an end of text, so N counts guesses up to the end, and a
    chain that meets the end counts like any other: without it the mean would be one over texts that
    go on.  A text that was cut, at a number of new tokens or at the length of a sequence, is
    different: nobody knows what the target would have said next.  A start with fewer than gamma
    places before the cut does not count, whether or not the text ended before.  That choice depends
    on the place alone, so the mean over the other starts stays unbiased.

    Args:
      ratio: [B, T] min(1, q/p) of the token that follows; 0 where that token ends the text.
      alpha: [B, T] sum_v min(p, q).
      drawn: [B, T] 1 where the target drew the token that follows, 0 behind the end of the text.
      limit: [B] places before the cut of each row, at most T: how far its text could have gone.
      num_drafts: gamma, at most T.

    Returns:
      Lengths in [0, gamma] and a mask of 0 and 1, both [B, T - gamma + 1].
    """
    width = ratio.shape[1] - num_drafts + 1
    reached, length = jnp.ones_like(ratio[:, :width]), jnp.zeros_like(ratio[:, :width])
    for k in range(num_drafts):
        here = slice(k, k + width)
        there = drawn[:, here] > 0
        length = length + reached * alpha[:, here] * there
        reached = reached * ratio[:, here] * there
    return length, starts(drawn, limit, num_drafts).astype(ratio.dtype)
