"""`offer`: the children of each parent of a tree, with the chances by which a tree is chosen."""

from __future__ import annotations

import jax
from jax import Array

from specjax import sampling
from specjax.contract import Context


def offer(
    logits: Array, warped: Array, noise: Array, width: int, context: Context
) -> tuple[Array, Array, Array]:
    """Returns the children of each parent, best first, and how likely each of them is accepted.

    Under shared noise a child counts with its probability after the noise.  Under independent draws
    it counts by its rank and not by its token: a chance must not depend on what was drawn.

    Args:
      logits, warped: [B, M, V] after each parent, as in `sampling.scores`.
      noise: [B, M or 1, V].
      width: K, the children of a parent.
      context: of the step; its `survival` turns the source's probabilities into chances.

    Returns:
      The logarithms of the source's probabilities [B, M, K] and of the chances [B, M, K], each if
      the parent is accepted, and the children's tokens [B, M, K].
    """
    score = sampling.scores(logits, warped, noise)
    found, best = sampling.top_k(jax.nn.log_softmax(score), width)
    if not context.shared_noise:
        ranked = jax.nn.log_softmax(sampling.scores(logits, warped, 0.0))
        found = sampling.top_k(ranked, width)[0]
    chance = found if context.survival is None else context.survival(found)
    return found, chance, best
