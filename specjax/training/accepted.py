"""The expected accepted length of a chain: its exact value, which can be differentiated.

Speculative sampling drafts x_1 ... x_k and accepts them all with probability
prod_i min(p, q)(x_i | x_<i).  For the number N of accepted drafts out of gamma,

    E[N] = sum_k P(N >= k)
         = sum_k E_{x ~ target} [ prod_{i<k} min(1, q(x_i | x_<i) / p(x_i | x_<i)) * alpha_k ]

with alpha_k = sum_v min(p, q)(v | x_<k): the last of the k factors is summed over all tokens, and
the earlier ones are averaged under p.  So a mean over text of the *target*, sampled with the
settings it is served with, is unbiased.  Every factor has a gradient, so neither samples from the
draft nor a score-function estimator are needed.  All chains in a text share one pass, since q(x_i |
x_<i) does not depend on where the chain starts.
"""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.sampling import Sampling
from specjax.training.divergences import acceptance, forward_kl
from specjax.training.losses import Teacher, log_draft, log_target

ArrayT = TypeVar("ArrayT", Array, np.ndarray)


def statistics(
    logits: Array,
    labels: Array,
    target_hidden: Array,
    teacher: Teacher,
    sampling: Sampling | None = None,
) -> Array:
    """Computes the forward KL, min(1, q/p) of the label, and alpha, as [C, 3], for `chunked_rows`.

    Shapes are those of `losses.against`; labels are [C].
    """
    target = log_target(teacher.logits(target_hidden), sampling)
    draft = log_draft(logits, sampling)
    p, q = (jnp.take_along_axis(x, labels[:, None], axis=1)[:, 0] for x in (target, draft))
    return jnp.stack(
        [forward_kl(target, draft), jnp.exp(jnp.minimum(0, q - p)), acceptance(target, draft)],
        axis=1,
    )


def starts(drawn: ArrayT, limit: ArrayT, num_drafts: int) -> ArrayT:
    """Returns [B, T - gamma + 1] bool: the positions at which a chain may start.

    All gamma positions of such a chain lie before the cut of its row.  The arguments are those of
    `expected_accepted_length`.
    """
    width = drawn.shape[1] - num_drafts + 1
    return (drawn[:, :width] > 0) & (np.arange(width) + num_drafts <= limit[:, None])


def expected_accepted_length(
    ratio: Array, alpha: Array, drawn: Array, limit: Array, num_drafts: int
) -> tuple[Array, Array]:
    """Returns E[N] of the chain that starts at each position, and a mask of the valid starts.

    The decoder commits no draft after an EOS, so N counts drafts up to the EOS.  A chain that meets
    the EOS counts like any other: without it the mean would cover only texts that go on.  This is
    different for a text that was cut, by a limit on new tokens or by the sequence length, because
    its continuation is unknown.  A start with fewer than gamma positions before the cut does not
    count, whether or not the text ended before.  That choice depends only on the position, so the
    mean over the other starts stays unbiased.

    Args:
      ratio: [B, T] min(1, q/p) of the token that follows; 0 where that token is an EOS.
      alpha: [B, T] sum_v min(p, q).
      drawn: [B, T] 1 where the target drew the token that follows, 0 after the EOS.
      limit: [B] positions before the cut of each row, at most T.
      num_drafts: gamma, at most T.

    Returns:
      Lengths in [0, gamma] and a mask of 0 and 1, both [B, T - gamma + 1].
    """
    width = ratio.shape[1] - num_drafts + 1
    reached, length = jnp.ones_like(ratio[:, :width]), jnp.zeros_like(ratio[:, :width])
    for k in range(num_drafts):
        here = slice(k, k + width)
        is_drawn = drawn[:, here] > 0
        length = length + reached * alpha[:, here] * is_drawn
        reached = reached * ratio[:, here] * is_drawn
    return length, starts(drawn, limit, num_drafts).astype(ratio.dtype)
