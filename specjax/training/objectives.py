"""The losses of a drafter's prediction of one token: functions of log-probabilities and token.

The draft may know fewer tokens than the target.  Then the target's log-probabilities are those of
the draft's tokens, and their probabilities may sum to less than 1: a draft is never accepted where
the target would have drawn one of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specjax.training.divergences import DIVERGENCES, Divergence, acceptance
from specjax.training.losses import capped
from specjax.training.precision import mixed_dot_general

Objective = Callable[[Array, Array, Array], Array]
"""`objective(target [C, U], draft [C, U], labels [C]) -> [C]`; a label is negative for a token that
the draft does not know."""


def cross_entropy(target: Array, draft: Array, labels: Array) -> Array:
    """Computes -log q(label); 0 for a label that the draft does not know."""
    picked = jnp.take_along_axis(draft, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    return jnp.where(labels >= 0, -picked, 0.0)


def cross_entropy_and_distance(target: Array, draft: Array, labels: Array) -> Array:
    """Computes 0.1 cross-entropy + 0.9 sum_v |p - q|, the loss of DSpark (DeepSeek's DeepSpec)."""
    distance = 2 * (1 - acceptance(target, draft))
    return 0.1 * cross_entropy(target, draft, labels) + 0.9 * distance


def _without_labels(divergence: Divergence) -> Objective:
    return lambda target, draft, labels: divergence(target, draft)


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": cross_entropy,
    **{name: _without_labels(divergence) for name, divergence in DIVERGENCES.items()},
    "cross-entropy-l1": cross_entropy_and_distance,
}
"""The objectives by their names on the command line."""


def per_row(
    objective: Objective, softcap: float | None, target_softcap: float | None
) -> Callable[..., tuple[Array, Array]]:
    """Returns a loss for `chunked_with_rows`; its numbers of each row are the acceptance alpha [C].

    The logits are [C, U], and then the rows are weights [C], labels [C], and the target's hidden
    states [C, E].  Shared are the target's output matrix [E, V], and the target's id of each of the
    draft's tokens [U], or None if they are the same.
    """

    def loss(
        logits: Array,
        weight: Array,
        labels: Array,
        target_hidden: Array,
        target_head: Array,
        known: Array | None,
    ) -> tuple[Array, Array]:
        theirs = mixed_dot_general(target_hidden, target_head, (((1,), (0,)), ((), ())))
        target = jax.nn.log_softmax(capped(theirs, target_softcap))
        if known is not None:
            target = jnp.take(target, known, axis=1)
        draft = jax.nn.log_softmax(capped(logits, softcap))
        each = objective(target, draft, labels)
        # Rows of weight 0 are padding, whose numbers may be anything.
        total = jnp.sum(jnp.where(weight > 0, weight * each, 0.0))
        return total, jax.lax.stop_gradient(acceptance(target, draft))

    return loss


def mean_of(x: Array, weight: Array) -> Array:
    """Returns the weighted mean of x; 0 without any weight."""
    return jnp.sum(weight * x) / jnp.maximum(weight.sum(), 1)


def binary_cross_entropy(estimate: Array, alpha: Array) -> Array:
    """Computes the cross-entropy of an estimated probability of acceptance, like alpha."""
    estimate = jnp.clip(estimate, 1e-6, 1 - 1e-6)
    return -(alpha * jnp.log(estimate) + (1 - alpha) * jnp.log1p(-estimate))
