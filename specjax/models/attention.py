"""Grouped-query attention with any mask, and causal attention; long inputs are done in blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from specjax.models.products import float32_dot_general
from specjax.platforms import on_tpu

_CAUSAL_BLOCK = 64
_LONG = 2048  # a TPU reads the filled part of so many slots in blocks, whatever the width
BLOCK_SLOTS = 512
"""Slots of a cache that are read at a time, where a pass reads its filled part only."""

_WIDE = 64  # passes of at least so many tokens read the slots in blocks on every platform


def attend(
    query: Array,
    keys: Array,
    values: Array,
    visible: Array,
    scale: float | None = None,
    softcap: float | None = None,
) -> Array:
    """Softmax attention with an explicit mask.

    Args:
      query: [B, N, H, D]; H is a multiple of K.
      keys, values: [B, K, S, D].
      visible: [B or 1, N, S] bool; every token attends to at least one slot.
      scale: of the scores, by default D ** -0.5.
      softcap: bounds the scores by c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2).

    Returns:
      [B, N, H * D].  Scores and their softmax are float32 whatever the inputs are.
    """
    batch, width, heads, dim = query.shape
    groups = heads // keys.shape[1]
    factor = dim**-0.5 if scale is None else scale
    grouped = query.reshape(batch, width, keys.shape[1], groups, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(batch, keys.shape[1], groups * width, dim)

    def whole(grouped: Array, keys: Array, values: Array, visible: Array) -> Array:
        scores = _scores(grouped, keys, visible, factor, softcap)
        return _mix(jax.nn.softmax(scores, axis=-1), values)

    def in_blocks(grouped: Array, keys: Array, values: Array, visible: Array) -> Array:
        return _mix_in_blocks(grouped, keys, values, visible, factor, softcap)

    inputs = grouped, keys, values, visible
    if width >= _WIDE and keys.shape[2] > BLOCK_SLOTS:
        out = in_blocks(*inputs)
    elif keys.shape[2] >= _LONG:
        out = on_tpu(in_blocks, whole, *inputs)
    else:
        out = whole(*inputs)
    out = (
        out.astype(values.dtype)
        .reshape(batch, keys.shape[1], groups, width, dim)
        .transpose(0, 3, 1, 2, 4)
    )
    return out.reshape(batch, width, heads * dim)


def _scores(
    grouped: Array, keys: Array, visible: Array, scale: float, softcap: float | None
) -> Array:
    """[B, K, R, S] float32 for queries [B, K, R, D]; R is (query heads per key head) times N."""
    slots = keys.shape[2]
    scores = float32_dot_general(grouped, keys, (((3,), (3,)), ((0, 1), (0, 1)))) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    by_head = scores.reshape(*scores.shape[:2], -1, visible.shape[1], slots)
    # Masked scores become a finite number, so that an infinite one cannot turn into NaN later.
    return jnp.where(visible[:, None, None], by_head, jnp.finfo(jnp.float32).min).reshape(
        scores.shape
    )


def _mix(weights: Array, values: Array) -> Array:
    """[B, K, R, S] by [B, K, S, D], in float32."""
    weights = weights.astype(values.dtype)
    return float32_dot_general(weights, values, (((3,), (2,)), ((0, 1), (0, 1))))


def _mix_in_blocks(
    grouped: Array, keys: Array, values: Array, visible: Array, scale: float, softcap: float | None
) -> Array:
    """`attend` over one block of slots at a time, with an online softmax.  Returns [B, K, R, D].

    It covers the slots from the first to the last one that any token attends to.  So a chunk of a
    long prompt skips the slots that are still empty, and only the scores of one block are in
    memory.

    Reference: Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3.
    """
    slot = jnp.arange(keys.shape[2])
    seen = visible.any((0, 1))
    first = jnp.argmax(seen) // BLOCK_SLOTS
    last = -(-jnp.max(jnp.where(seen, slot + 1, 0)) // BLOCK_SLOTS)

    def step(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, mixed = carry
        # The last block is moved back to fit, so it overlaps the block before it.
        start = jnp.minimum(number * BLOCK_SLOTS, len(slot) - BLOCK_SLOTS)

        def cut(x: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, start, BLOCK_SLOTS, axis)

        scores = _scores(
            grouped, cut(keys, 2), cut(visible & (slot >= number * BLOCK_SLOTS), 2), scale, softcap
        )
        higher = jnp.maximum(most, scores.max(-1, keepdims=True))
        # If a token had no visible slot so far, its sums hold only masked slots.  `shrink` sets
        # them to 0 at the first visible one.
        weights, shrink = jnp.exp(scores - higher), jnp.exp(most - higher)
        return (
            higher,
            total * shrink + weights.sum(-1, keepdims=True),
            mixed * shrink + _mix(weights, cut(values, 2)),
        )

    shape = grouped.shape[:3]
    begun = (
        jnp.full((*shape, 1), jnp.finfo(jnp.float32).min),
        jnp.zeros((*shape, 1)),
        jnp.zeros(grouped.shape),
    )
    with jax.named_scope("blocks"):
        _, total, mixed = jax.lax.fori_loop(first, last, step, begun)
    return mixed / total


def causal_attend(
    query: Array,
    keys: Array,
    values: Array,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Array:
    """`attend` where token n attends to tokens 0 ... n, or only to the last `window` of them.

    It takes one block of queries at a time, with only those keys that one of them attends to.  That
    skips nearly half of the scores of a long text and keeps the rest in a CPU's cache (a training
    step of 256 tokens on two cores is 1.17 times as fast).
    """
    length = query.shape[1]
    parts = []
    for start in range(0, length, _CAUSAL_BLOCK):
        stop = min(start + _CAUSAL_BLOCK, length)
        first = 0 if window is None else max(0, start - window + 1)
        distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
        visible = (distance >= 0) & (distance < (window or length))
        seen = slice(first, stop)
        parts.append(
            attend(
                query[:, start:stop],
                keys[:, :, seen],
                values[:, :, seen],
                visible[None],
                scale,
                softcap,
            )
        )
    return jnp.concatenate(parts, axis=1)
