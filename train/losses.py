"""Losses on logits that are never all there: a chunk of tokens at a time, forward and backward together.

The logits of a batch are its largest tensor by far (tokens x vocabulary).  `chunked` computes them a chunk at a time,
takes the loss and its gradient while they are at hand, and keeps the gradients, which have the size of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from train.precision import mixed_dot_general

_LAST_FIRST = (((1,), (0,)), ((), ()))


def chunked(loss: Callable[..., Array], chunk: int = 512) -> Callable[..., Array]:
    """Make `loss(logits [C, V], *extras [C, ...]) -> sum` into `f(hidden [M, E], head [E, V], *extras [M, ...])`.

    The result has gradients for `hidden` and `head`; `extras` are constants.  M is padded up to whole chunks with
    zeros: `loss` must give nothing for a row whose last extra, its weight, is 0.
    """

    def part(hidden, head, extras):
        return loss(mixed_dot_general(hidden, head, _LAST_FIRST), *extras)

    @jax.custom_vjp
    def total(hidden, head, *extras):
        return forward(hidden, head, *extras)[0]

    def forward(hidden, head, *extras):
        rows = hidden.shape[0]
        size = min(chunk, rows)
        pad = -rows % size

        def split(x):
            return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

        def step(carry, xs):
            value, (grad_hidden, grad_head) = jax.value_and_grad(part, (0, 1))(xs[0], head, xs[1])
            return (carry[0] + value, carry[1] + grad_head), grad_hidden

        start = (jnp.float32(0), jnp.zeros_like(head))
        (value, grad_head), grad_hidden = jax.lax.scan(step, start, (split(hidden), jax.tree.map(split, extras)))
        return value, (grad_hidden.reshape(-1, hidden.shape[1])[:rows], grad_head, extras)

    def backward(saved: Any, grad: Array):
        grad_hidden, grad_head, extras = saved
        return grad_hidden * grad, grad_head * grad, *(None for _ in extras)

    total.defvjp(forward, backward)
    return total


def cross_entropy(logits: Array, labels: Array, weight: Array) -> Array:
    """Sum over rows of weight * -log softmax(logits)[label].  Shapes [C, V], [C], [C]."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weight * (jax.nn.logsumexp(logits, axis=1) - picked))


def forward_kl(logits: Array, target_logits: Array, weight: Array) -> Array:
    """Sum over rows of weight * KL(target || draft) in nats.  Shapes [C, V], [C, V], [C].

    Reference: Zhou et al. 2023, DistillSpec, arXiv 2310.08461, section 3 (FKL).
    """
    target = jax.nn.log_softmax(target_logits)
    return jnp.sum(weight * jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(logits)), axis=1))
