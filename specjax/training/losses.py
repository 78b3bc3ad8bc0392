"""Losses that compute the logits one chunk of tokens at a time.

The logits of a batch are by far its largest tensor (tokens x vocabulary).  `chunked` computes them
in chunks, takes the loss and the gradient of each chunk at once, and stores only the gradients,
which have the size of the inputs.  `chunked_rows` returns numbers per token, for losses that
combine them further, such as products along a text.  Its backward pass computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax import models
from specjax.sampling import Sampling, warp
from specjax.training import divergences
from specjax.training.divergences import Divergence, blend
from specjax.training.precision import mixed_dot_general
from specjax.training.top import Top, folded, top_of
from specjax.types import ArrayTree

TreeT = TypeVar("TreeT")

Operands = tuple[ArrayTree, ...]
Saved = tuple[Array, Array, Operands, Operands]

_LAST_FIRST = (((1,), (0,)), ((), ()))


@struct.dataclass
class Teacher:
    """The output matrix of a target, which maps hidden states to logits without a gradient."""

    matrix: Array | models.Int8  # [E, V]
    softcap: float | None = struct.field(pytree_node=False, default=None)
    # The first tokens that count, where the vocabulary is padded to another size than the draft's.
    size: int | None = struct.field(pytree_node=False, default=None)

    def logits(self, hidden: Array) -> Array:
        """Maps [C, E] to [C, V] float32, in int8 if the target multiplies so, else in bfloat16."""
        if isinstance(self.matrix, models.Int8):
            product = models.int8_dot_general(hidden, self.matrix.unbox(), _LAST_FIRST)
        else:
            product = mixed_dot_general(hidden, self.matrix, _LAST_FIRST)
        return capped(product.astype(jnp.float32), self.softcap)[:, : self.size]


def capped(logits: Array, cap: float | None) -> Array:
    """Computes c tanh(logits / c) for a softcap c; None is no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def with_cap(
    loss: Callable[..., Array], cap: float | None, size: int | None = None
) -> Callable[..., Array]:
    """Returns a loss on logits with a softcap, or of which only the first `size` count."""
    if cap is None and size is None:
        return loss
    return lambda logits, *others: loss(capped(logits, cap)[:, :size], *others)


def chunked(loss: Callable[..., Array], chunk: int = 512) -> Callable[..., Array]:
    """Turns a loss on logits into a loss on hidden states that works in chunks.

    Args:
      loss: `loss(logits [C, V], *rows [C, ...], *shared)` returns a sum over rows.  It must be zero
        for rows of weight 0, since M is padded with zeros to whole chunks.
      chunk: the most rows of a chunk.

    Returns:
      A function `f(hidden [M, E], head [E, V], rows, shared=())`.  `rows` is a tuple of arrays
      [M, ...] that are cut into chunks like `hidden`; the first holds the weights of the rows.
      Every chunk sees all of the arrays in the tuple `shared`.  Only `hidden` and `head` have
      gradients.
    """
    both = chunked_with_rows(lambda *arrays: (loss(*arrays), ()), chunk)

    def total(hidden: Array, head: Array, rows: Operands, shared: Operands = ()) -> Array:
        return both(hidden, head, rows, shared)[0]

    return total


def chunked_with_rows(
    loss: Callable[..., tuple[Array, TreeT]], chunk: int = 512, trains_head: bool = True
) -> Callable[..., tuple[Array, TreeT]]:
    """Turns a loss as `chunked`, if it also returns numbers of each row without a gradient.

    Args:
      loss: like that of `chunked`, but it returns the sum, and a pytree of arrays [C, ...].
      chunk: the most rows of a chunk.
      trains_head: True if `head` has a gradient, which costs as much as the logits.

    Returns:
      A function like that of `chunked`, which returns the sum, and the pytree with leaves [M, ...].
    """

    def part(hidden: Array, head: Array, rows: Operands, shared: Operands) -> tuple[Array, TreeT]:
        return loss(mixed_dot_general(hidden, head, _LAST_FIRST), *rows, *shared)

    @jax.custom_vjp
    def total(
        hidden: Array, head: Array, rows: Operands, shared: Operands = ()
    ) -> tuple[Array, TreeT]:
        return forward(hidden, head, rows, shared)[0]

    def forward(
        hidden: Array, head: Array, rows: Operands, shared: Operands
    ) -> tuple[tuple[Array, TreeT], tuple[Array, Array | None]]:
        trained = (0, 1) if trains_head else (0,)

        def step(
            carry: tuple[Array, Array | None], xs: tuple[Array, Operands]
        ) -> tuple[tuple[Array, Array | None], tuple[Array, TreeT]]:
            (value, extra), grads = jax.value_and_grad(part, trained, has_aux=True)(
                xs[0], head, xs[1], shared
            )
            summed = carry[1] + grads[1] if trains_head else None
            return (carry[0] + value, summed), (grads[0], extra)

        zero = jnp.zeros_like(head, jnp.float32) if trains_head else None
        start = (jnp.float32(0), zero)
        (value, grad_head), (grad_hidden, extra) = jax.lax.scan(
            step, start, _split((hidden, rows), chunk)
        )
        count = len(hidden)
        extra = jax.tree.map(lambda x: _join(x)[:count], extra)
        saved = None if grad_head is None else grad_head.astype(head.dtype)
        return (value, extra), (_join(grad_hidden)[:count], saved)

    def backward(
        saved: tuple[Array, Array | None], grad: tuple[Array, TreeT]
    ) -> tuple[Array, Array | None, None, None]:
        hidden, head = saved
        return grad[0] * hidden, None if head is None else grad[0] * head, None, None

    total.defvjp(forward, backward)
    return total


def chunked_rows(statistics: Callable[..., Array], chunk: int = 512) -> Callable[..., Array]:
    """Turns `statistics(logits [C, V], *rows, *shared) -> [C, S]` into a function in chunks.

    The function is `f(hidden, head, rows, shared=()) -> [M, S]`.  Its arguments are those of
    `chunked`, but `rows` has no weights, since padding rows are removed from the result.
    """

    @jax.custom_vjp
    def whole(hidden: Array, head: Array, rows: Operands, shared: Operands = ()) -> Array:
        def step(_: None, xs: tuple[Array, Operands]) -> tuple[None, Array]:
            return None, statistics(mixed_dot_general(xs[0], head, _LAST_FIRST), *xs[1], *shared)

        chunks = jax.lax.scan(step, None, _split((hidden, rows), chunk))[1]
        return _join(chunks)[: len(hidden)]

    def forward(
        hidden: Array, head: Array, rows: Operands, shared: Operands
    ) -> tuple[Array, Saved]:
        return whole(hidden, head, rows, shared), (hidden, head, rows, shared)

    def backward(saved: Saved, grad: Array) -> tuple[Array, Array, None, None]:
        hidden, head, rows, shared = saved

        def pulled(logits: Array, grad: Array, *others: ArrayTree) -> Array:
            return jnp.sum(grad * statistics(logits, *others))

        pull = jax.grad(chunked(pulled, chunk), (0, 1))
        return *pull(hidden, head, (grad, *rows), shared), None, None

    whole.defvjp(forward, backward)
    return whole


def mapped(function: Callable[[Array], TreeT], hidden: Array, chunk: int = 512) -> TreeT:
    """Returns `function` of hidden states [M, E], one chunk at a time; leaves [M, ...]."""
    chunks = jax.lax.map(function, _split(hidden, chunk))
    return jax.tree.map(lambda x: _join(x)[: len(hidden)], chunks)


def _split(arrays: TreeT, chunk: int) -> TreeT:
    """Cuts arrays [M, ...] into chunks [K, C, ...], padded with zeros at the end.

    Chunk k has the rows k, k + K, ..., so on a mesh every device holds equally many rows of it.
    """

    def split(x: Array) -> Array:
        size = min(chunk, len(x))
        padded = jnp.pad(x, [(0, -len(x) % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, arrays)


def _join(chunks: Array) -> Array:
    """Inverts `_split`, from [K, C, ...] to [M, ...]; M includes the padding."""
    return chunks.swapaxes(0, 1).reshape(-1, *chunks.shape[2:])


def log_target(logits: Array, sampling: Sampling | None = None) -> Array:
    """Returns log-probabilities [C, V] of the target under the sampling settings it is served with.

    `sampling` has one row.
    """
    return jax.nn.log_softmax(logits if sampling is None else warp(logits[None], sampling)[0])


def log_draft(logits: Array, sampling: Sampling | None = None) -> Array:
    """Returns log-probabilities [C, V] of the draft at the temperature it is served with.

    At temperature 0, where there would be no gradient, 1 is used instead.  Filters such as top-k
    are not applied, since the tokens they remove would have no gradient.  The draft learns the
    filtered distribution of the target instead.
    """
    if sampling is None:
        return jax.nn.log_softmax(logits)
    return jax.nn.log_softmax(
        logits / jnp.where(sampling.temperature == 0, 1, sampling.temperature)
    )


def cross_entropy(logits: Array, weight: Array, labels: Array) -> Array:
    """Returns the sum of weight * -log softmax(logits)[label], of [C, V], [C] and [C]."""
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(weight * (jax.nn.logsumexp(logits, axis=1) - picked))


def against(divergence: Divergence, top: int = 0) -> Callable[..., Array]:
    """Returns a loss for `chunked`: the sum over rows of weight * divergence(target, draft).

    Shapes are logits [C, V], weight [C] and target_hidden [C, E].  The loss
    computes the target's logits itself, so that they too exist for one chunk at a time.  With a
    `share`, the divergence is blended with forward KL.  With `top`, all tokens but the target's
    likeliest ones count as one (`specjax.training.top`).
    """

    def loss(
        logits: Array,
        weight: Array,
        target_hidden: Array,
        teacher: Teacher,
        sampling: Sampling | None = None,
        share: Array | None = None,
    ) -> Array:
        target = log_target(teacher.logits(target_hidden), sampling)
        draft = log_draft(logits, sampling)
        if top:
            target, draft = folded(top_of(target, top), draft)
        return jnp.sum(weight * blend(divergence, share)(target, draft))

    return loss


def against_recorded(divergence: Divergence) -> Callable[..., Array]:
    """Returns `against` for recorded likeliest tokens, at the same sampling settings.

    Shapes are logits [C, V], weight [C], and of the target's tokens ids and log_probs [C, k].
    """

    def loss(
        logits: Array,
        weight: Array,
        ids: Array,
        log_probs: Array,
        sampling: Sampling | None = None,
        share: Array | None = None,
    ) -> Array:
        target, draft = folded(Top(ids, log_probs), log_draft(logits, sampling))
        return jnp.sum(weight * blend(divergence, share)(target, draft))

    return loss


forward_kl = against(divergences.forward_kl)


def agreement(
    logits: Array, target_hidden: Array, teacher: Teacher, sampling: Sampling | None = None
) -> Array:
    """Computes forward KL, alpha, and whether the argmaxes agree, [C, 3], for `chunked_rows`.

    Shapes are those of `against`.  Alpha is the acceptance rate of the rule `rejection` if target
    and draft are both sampled with these settings, filters included.
    """
    logits_target = teacher.logits(target_hidden)
    target = log_target(logits_target, sampling)
    kl = divergences.forward_kl(target, log_draft(logits, sampling))
    alpha = divergences.acceptance(target, log_target(logits, sampling))
    return jnp.stack(
        [kl, alpha, jnp.argmax(logits_target, axis=1) == jnp.argmax(logits, axis=1)], axis=1
    )


def recorded_agreement(
    logits: Array, ids: Array, log_probs: Array, sampling: Sampling | None = None
) -> Array:
    """Computes bounds of `agreement` from k recorded tokens, [C, 4], for `chunked_rows`.

    These are a lower bound of forward KL, a lower and an upper bound of alpha, and whether both
    have the same argmax.  The bounds of alpha differ by the mass that both models may share in the
    tail.
    """
    top = Top(ids, log_probs)
    target, draft = folded(top, log_draft(logits, sampling))
    kl = divergences.forward_kl(target, draft)
    served = folded(top, log_target(logits, sampling))[1]
    shared = jnp.minimum(jnp.exp(target), jnp.exp(served))
    k = ids.shape[1]
    same = ids[:, 0] == jnp.argmax(logits, axis=1)
    return jnp.stack([kl, shared[:, :k].sum(1), shared.sum(1), same], axis=1)
