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
    """Make `loss(logits [C, V], *rows [C, ...], *shared) -> sum` into `f(hidden [M, E], head [E, V], rows, shared)`.

    `rows` is a tuple of arrays [M, ...] that are cut into chunks with `hidden`, the first of them the rows' weights;
    `shared` is a tuple of arrays that every chunk sees whole.  Gradients flow to `hidden` and `head` alone.  M is
    padded up to whole chunks with zeros, so `loss` must give nothing for a row of weight 0.
    """

    def part(hidden, head, rows, shared):
        return loss(mixed_dot_general(hidden, head, _LAST_FIRST), *rows, *shared)

    @jax.custom_vjp
    def total(hidden, head, rows, shared=()):
        return forward(hidden, head, rows, shared)[0]

    def forward(hidden, head, rows, shared):
        count = hidden.shape[0]
        size = min(chunk, count)

        def split(x):
            return jnp.pad(x, [(0, -count % size)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, size, *x.shape[1:])

        def step(carry, xs):
            value, (grad_hidden, grad_head) = jax.value_and_grad(part, (0, 1))(xs[0], head, xs[1], shared)
            return (carry[0] + value, carry[1] + grad_head), grad_hidden

        start = (jnp.float32(0), jnp.zeros_like(head))
        (value, grad_head), grad_hidden = jax.lax.scan(step, start, (split(hidden), jax.tree.map(split, rows)))
        return value, (grad_hidden.reshape(-1, hidden.shape[1])[:count], grad_head)

    def backward(saved: Any, grad: Array):
        return saved[0] * grad, saved[1] * grad, None, None

    total.defvjp(forward, backward)
    return total


def cross_entropy(logits: Array, weight: Array, labels: Array) -> Array:
    """Sum over rows of weight * -log softmax(logits)[label].  Shapes [C, V], [C], [C]."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weight * (jax.nn.logsumexp(logits, axis=1) - picked))


def forward_kl(logits: Array, weight: Array, target_hidden: Array, target_head: Array) -> Array:
    """Sum over rows of weight * KL(target || draft) in nats.  Shapes [C, V], [C], [C, E], [E, V].

    The target's logits are computed here, so that they too exist for one chunk only.

    Reference: Zhou et al. 2023, DistillSpec, arXiv 2310.08461, section 3 (forward KL).
    """
    target = jax.nn.log_softmax(mixed_dot_general(target_hidden, target_head, _LAST_FIRST))
    return jnp.sum(weight * jnp.sum(jnp.exp(target) * (target - jax.nn.log_softmax(logits)), axis=1))


def agreement(logits: Array, weight: Array, target_hidden: Array, target_head: Array) -> tuple[Array, Array]:
    """Sums over rows of weight * sum_v min(target, draft), which is the acceptance rate of `rejection` at temperature
    1, and of weight * (do both have the same argmax), which is that of greedy decoding.  Shapes as in `forward_kl`."""
    target = mixed_dot_general(target_hidden, target_head, _LAST_FIRST)
    overlap = jnp.minimum(jax.nn.softmax(target), jax.nn.softmax(logits)).sum(axis=1)
    same = jnp.argmax(target, axis=1) == jnp.argmax(logits, axis=1)
    return jnp.sum(weight * overlap), jnp.sum(weight * same)
