"""Divergences of the draft's distribution from the target's.

They are functions of log-probabilities [..., V] and return [...].  The target's log-probabilities
may be -inf, for tokens that top-k or top-p leave out; the draft's may not.  Gradients are meant for
the draft only.

References: Zhou et al. 2023, DistillSpec, arXiv 2310.08461, section 3 and table 1; for
`log_acceptance` and `adaptive` the LK losses, arXiv 2602.23881.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Divergence = Callable[[Array, Array], Array]

_SLOPE = 3.0
"""The rate at which `adaptive` replaces forward KL as the acceptance rate rises."""


def forward_kl(target: Array, draft: Array) -> Array:
    """Computes KL(target || draft) = sum_v p log(p / q), in nats."""
    return _weighted(target, target, draft)


def reverse_kl(target: Array, draft: Array) -> Array:
    """Computes KL(draft || target) = sum_v q log(q / p), which may be infinite."""
    return _weighted(draft, draft, target)


def jensen_shannon(target: Array, draft: Array) -> Array:
    """Computes (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2.  At most log 2."""
    middle = jnp.logaddexp(target, draft) - jnp.log(2.0)
    return (_weighted(target, target, middle) + _weighted(draft, draft, middle)) / 2


def total_variation(target: Array, draft: Array) -> Array:
    """Computes 1 - alpha: the probability that speculative sampling rejects a draft."""
    return 1 - acceptance(target, draft)


def log_acceptance(target: Array, draft: Array) -> Array:
    """Computes -log alpha, where alpha = sum_v min(p, q) is the probability of acceptance.

    Its gradient is that of total variation divided by alpha, so it does not vanish for a draft that
    shares little with the target.
    """
    return -jnp.log(jnp.maximum(acceptance(target, draft), 1e-9))


def adaptive(target: Array, draft: Array) -> Array:
    """Computes w KL + (1 - w) (1 - alpha) with w = exp(-3 alpha), which has no gradient.

    A draft that shares little with the target learns by forward KL, and a good one by acceptance.
    """
    alpha = acceptance(target, draft)
    weight = jnp.exp(-_SLOPE * jax.lax.stop_gradient(alpha))
    return weight * forward_kl(target, draft) + (1 - weight) * (1 - alpha)


def acceptance(target: Array, draft: Array) -> Array:
    """Computes alpha = sum_v min(p, q): the probability that speculative sampling accepts a draft.

    Source: Leviathan et al. 2022, arXiv 2211.17192, corollary 3.6.
    """
    return jnp.minimum(jnp.exp(target), jnp.exp(draft)).sum(-1)


def _weighted(weight: Array, one: Array, other: Array) -> Array:
    """Computes sum_v exp(weight) (one - other), where 0 times infinity is 0."""
    mass = jnp.exp(weight)
    is_positive = mass > 0
    difference = jnp.where(is_positive, one, 0) - jnp.where(is_positive, other, 0)
    return jnp.sum(jnp.where(is_positive, mass * difference, 0), axis=-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jensen-shannon": jensen_shannon,
    "total-variation": total_variation,
    "log-acceptance": log_acceptance,
    "adaptive": adaptive,
}
"""The divergences by their names on the command line."""


def blend(divergence: Divergence, share: Array | None) -> Divergence:
    """Returns a blend of forward KL (`share` 0) with `divergence` (`share` 1, or None)."""
    if share is None:
        return divergence
    return lambda target, draft: (
        (1 - share) * forward_kl(target, draft) + share * divergence(target, draft)
    )
