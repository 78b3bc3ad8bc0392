"""Running sums and products of a few numbers.

XLA makes several loops of `jnp.cumsum` and `jnp.cumprod` on a CPU, each of which takes about a
microsecond to start.  Here each is one loop over n * n terms, which takes less time for the few
numbers of a proposal.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def running_sum(x: Array) -> Array:
    """[..., n] -> [..., n]: the sum of the numbers up to each one along the last axis."""
    return jnp.where(_up_to(x), x[..., None, :], 0).sum(-1, dtype=x.dtype)


def running_product(x: Array) -> Array:
    """[..., n] -> [..., n]: the product of the numbers up to each one along the last axis."""
    return jnp.where(_up_to(x), x[..., None, :], 1).prod(-1, dtype=x.dtype)


def leading(x: Array) -> Array:
    """[..., n] bool -> [..., n] bool: True if all up to here are true, along the last axis."""
    return (x[..., None, :] | ~_up_to(x)).all(-1)


def _up_to(x: Array) -> Array:
    """Returns [n, n] bool: the entries up to each one."""
    place = jnp.arange(x.shape[-1])
    return place <= place[:, None]
