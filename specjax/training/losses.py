"""Losses on logits that are never all there: a chunk of tokens at a time.

The logits of a batch are its largest tensor by far (tokens x vocabulary).  `chunked` computes them a chunk at a time,
takes the loss and its gradient while they are at hand, and keeps the gradients, which have the size of the inputs.
`chunked_rows` is for numbers per token that something else combines, such as products along a text: its backward pass
computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.sampling import Sampling, warp
from specjax.training import divergences
from specjax.training.divergences import Divergence, blend
from specjax.training.precision import mixed_dot_general

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
        def step(carry, xs):
            value, (grad_hidden, grad_head) = jax.value_and_grad(part, (0, 1))(
                xs[0], head, xs[1], shared
            )
            return (carry[0] + value, carry[1] + grad_head), grad_hidden

        start = (jnp.float32(0), jnp.zeros_like(head, jnp.float32))
        (value, grad_head), grad_hidden = jax.lax.scan(step, start, _split((hidden, rows), chunk))
        return value, (_join(grad_hidden)[: len(hidden)], grad_head.astype(head.dtype))

    def backward(saved: Any, grad: Array):
        return saved[0] * grad, saved[1] * grad, None, None

    total.defvjp(forward, backward)
    return total


def chunked_rows(statistics: Callable[..., Array], chunk: int = 512) -> Callable[..., Array]:
    """Make `statistics(logits [C, V], *rows, *shared) -> [C, S]` into `f(hidden, head, rows, shared) -> [M, S]`.

    Arguments as in `chunked`, without weights: rows that pad a chunk are cut off again.
    """

    @jax.custom_vjp
    def whole(hidden, head, rows, shared=()):
        def step(_, xs):
            return None, statistics(mixed_dot_general(xs[0], head, _LAST_FIRST), *xs[1], *shared)

        found = jax.lax.scan(step, None, _split((hidden, rows), chunk))[1]
        return _join(found)[: len(hidden)]

    def forward(hidden, head, rows, shared):
        return whole(hidden, head, rows, shared), (hidden, head, rows, shared)

    def backward(saved: Any, grad: Array):
        hidden, head, rows, shared = saved

        def pulled(logits, grad, *others):
            return jnp.sum(grad * statistics(logits, *others))

        pull = jax.grad(chunked(pulled, chunk), (0, 1))
        return *pull(hidden, head, (grad, *rows), shared), None, None

    whole.defvjp(forward, backward)
    return whole


def _split(arrays: Any, chunk: int) -> Any:
    """Arrays [M, ...] as chunks [K, C, ...], padded with zeros at the end.

    Chunk k has the rows k, k + K, ...: on a mesh, of every device as many as of another, so that all read each chunk.
    """

    def split(x):
        size = min(chunk, len(x))
        padded = jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def _join(chunks: Array) -> Array:
    """What `_split` has cut, [K, C, E] as [M, E], padding too."""
    return chunks.swapaxes(0, 1).reshape(-1, chunks.shape[-1])


def log_target(logits: Array, sampling: Sampling | None = None) -> Array:
    """Log-probabilities [C, V] that the target is sampled from with the settings (one row of them) that it serves."""
    return jax.nn.log_softmax(logits if sampling is None else warp(logits[None], sampling)[0])


def log_draft(logits: Array, sampling: Sampling | None = None) -> Array:
    """Those of the draft, at the temperature that it serves; at 0, where nothing could be learned, at 1.

    A filter would hide tokens from the gradient: the draft is to learn the target's, so that its own has nothing to do.
    """
    if sampling is None:
        return jax.nn.log_softmax(logits)
    return jax.nn.log_softmax(
        logits / jnp.where(sampling.temperature == 0, 1, sampling.temperature)
    )


def cross_entropy(logits: Array, weight: Array, labels: Array) -> Array:
    """Sum over rows of weight * -log softmax(logits)[label].  Shapes [C, V], [C], [C]."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weight * (jax.nn.logsumexp(logits, axis=1) - picked))


def against(divergence: Divergence) -> Callable[..., Array]:
    """A loss for `chunked`: the sum over rows of weight * divergence(target, draft).

    Shapes logits [C, V], weight [C], target_hidden [C, E], target_head [E, V].  The target's logits are computed in
    it, so that they too exist for one chunk only.  With a `share`, it is a blend with forward KL.
    """

    def loss(logits, weight, target_hidden, target_head, sampling=None, share=None):
        target = log_target(mixed_dot_general(target_hidden, target_head, _LAST_FIRST), sampling)
        return jnp.sum(weight * blend(divergence, share)(target, log_draft(logits, sampling)))

    return loss


forward_kl = against(divergences.forward_kl)


def agreement(
    logits: Array, target_hidden: Array, target_head: Array, sampling: Sampling | None = None
) -> Array:
    """For `chunked_rows`: [C, 3], forward KL, alpha, and whether both have the same argmax.  Shapes as in `against`.

    Alpha is the acceptance rate of `rejection` where target and draft are both sampled with the settings, filters too.
    """
    logits_target = mixed_dot_general(target_hidden, target_head, _LAST_FIRST)
    target = log_target(logits_target, sampling)
    kl = divergences.forward_kl(target, log_draft(logits, sampling))
    alpha = divergences.acceptance(target, log_target(logits, sampling))
    return jnp.stack(
        [kl, alpha, jnp.argmax(logits_target, axis=1) == jnp.argmax(logits, axis=1)], axis=1
    )
