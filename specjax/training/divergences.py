"""How far a draft's distribution is from the target's: functions of log-probabilities [..., V], one number a row.

The target's may be -inf (tokens that top-k or top-p leave out), the draft's may not.  No gradient flows to the target.
Reference: Zhou et al. 2023, DistillSpec, arXiv 2310.08461, section 3 and table 1.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

Divergence = Callable[[Array, Array], Array]


def forward_kl(target: Array, draft: Array) -> Array:
    """KL(target || draft) = sum_v p log(p / q), in nats."""
    return _weighted(target, target, draft)


def reverse_kl(target: Array, draft: Array) -> Array:
    """KL(draft || target) = sum_v q log(q / p).  Infinite where the target leaves tokens out."""
    return _weighted(draft, draft, target)


def jensen_shannon(target: Array, draft: Array) -> Array:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2.  At most log 2."""
    middle = jnp.logaddexp(target, draft) - jnp.log(2.0)
    return (_weighted(target, target, middle) + _weighted(draft, draft, middle)) / 2


def total_variation(target: Array, draft: Array) -> Array:
    """1 - alpha: the chance that speculative sampling refuses a guess."""
    return 1 - acceptance(target, draft)


def acceptance(target: Array, draft: Array) -> Array:
    """alpha = sum_v min(p, q), the chance that speculative sampling accepts a guess (Leviathan et al. 2022,
    arXiv 2211.17192, corollary 3.6)."""
    return jnp.minimum(jnp.exp(target), jnp.exp(draft)).sum(-1)


def _weighted(weight: Array, one: Array, other: Array) -> Array:
    """sum_v exp(weight) (one - other), where 0 times infinity is 0."""
    mass = jnp.exp(weight)
    there = mass > 0
    return jnp.sum(
        jnp.where(there, mass * (jnp.where(there, one, 0) - jnp.where(there, other, 0)), 0), axis=-1
    )


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jensen-shannon": jensen_shannon,
    "total-variation": total_variation,
}
"""By their names on the command line."""


def blend(divergence: Divergence, share: Array | None) -> Divergence:
    """From forward KL (`share` 0) to another divergence (`share` 1, or None)."""
    if share is None:
        return divergence
    return lambda target, draft: (
        (1 - share) * forward_kl(target, draft) + share * divergence(target, draft)
    )
