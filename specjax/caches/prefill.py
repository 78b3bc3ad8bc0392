"""Reads a prompt in chunks of a fixed size, so that activations do not grow with its length.

    prompt   . . . . . . . . . . . . . . .      15 tokens, chunks of 4
             [read 0 ][read 1 ][read 2 ][3 ]    each stages after the tokens committed so far

Chunks bound the tokens of a pass, and `models.attention` bounds the slots that it reads at a time.
Only the cache and the hidden states that are returned grow with the length of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.contract import CacheT, Model, ParamsT

_T = TypeVar("_T")
_MadeT = TypeVar("_MadeT")
_HeldT = TypeVar("_HeldT")  # a cache, or a cache with other arrays

CHUNK = 512


def empty_cache(model: Model[ParamsT, CacheT], rows: int, text: int, ahead: int) -> CacheT:
    """Returns an empty cache of `model` for texts of `text` tokens, and `ahead` staged tokens.

    A layer with sliding-window attention may keep only its window: see
    `specjax.caches.sliding_window`.
    """
    cache = model.init_cache(rows, text + ahead)
    # CHUNK and not the width of this prompt, so that rows with any prompts fit into one batch.
    return cache.narrow(ahead, CHUNK)


def read_prompt(
    model: Model[ParamsT, CacheT],
    params: ParamsT,
    tokens: Array,
    count: Array,
    cache: CacheT,
    taps: tuple[int, ...] = (),
) -> tuple[Array, Array | None, CacheT]:
    """Reads `tokens` [B, W] after the cached ones, and commits `count` [B] of each row.

    The cache has room for all W tokens.  Up to `CHUNK` tokens are one pass.  More are a loop of
    passes of that size, and a shorter pass for the remainder.  A row whose prompt has ended stages
    padding after its own length.  That is before the chunk, so it needs no more slots.

    Returns:
      The last hidden states [B, W, E], the hidden states [B, W, sum E] after the layers in `taps`
      (None without taps), and the cache.
    """

    def read(
        cache: CacheT, start: Array | int, part: Array
    ) -> tuple[CacheT, tuple[Array, Array | None]]:
        new = jnp.clip(count - start, 0, part.shape[1])
        positions = positions_of(model, cache.length, part.shape[1], new)
        out = model.apply(params, part, positions, cache, taps=taps)
        committed = out.staged.commit(new)
        return committed, (out.hidden, out.features)

    cache, made = in_chunks(read, cache, tokens)
    return *made, cache


def positions_of(model: Model[ParamsT, CacheT], start: Array, width: int, count: Array) -> Array:
    """Returns the positions [B, W] of `count` [B] tokens from `start` [B] on, and of padding."""
    # A row that has no tokens left has only padding, whose positions could exceed the last one.
    return jnp.minimum(start[:, None] + places(width, count), model.max_positions - 1)


def places(width: int, count: Array) -> Array:
    """Returns [B, W] int32, how far each token of a pass is behind its first one.

    Padding, which follows the first `count` [B] tokens, gets the place of the last of them.  So its
    position does not exceed those of the text, and a model can tell it from text.
    """
    return jnp.minimum(jnp.arange(width), jnp.maximum(count - 1, 0)[:, None])


def in_chunks(
    read: Callable[[_HeldT, Array | int, _T], tuple[_HeldT, _MadeT]],
    cache: _HeldT,
    inputs: _T,
) -> tuple[_HeldT, _MadeT]:
    """Calls `read` for one chunk of the inputs after the other.

    Args:
      read: (cache, start, chunk) -> (cache, outputs); `start` is the index of the chunk's first
        token, and it commits the tokens of the chunk that are not padding.
      cache: before the first chunk.
      inputs: a tree of arrays [B, W, ...].

    Returns:
      The last cache, and the outputs [B, W, ...] of all chunks.
    """
    rows, width = jax.tree.leaves(inputs)[0].shape[:2]
    if width <= CHUNK:
        return read(cache, 0, inputs)
    whole = width // CHUNK * CHUNK  # tokens in chunks of full size
    starts = jnp.arange(0, whole, CHUNK)
    parts = jax.tree.map(
        lambda x: x[:, :whole].reshape(rows, -1, CHUNK, *x.shape[2:]).swapaxes(0, 1), inputs
    )
    cache, made = jax.lax.scan(lambda cache, chunk: read(cache, *chunk), cache, (starts, parts))
    made = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, whole, *x.shape[3:]), made)
    if whole < width:
        cache, last = read(cache, whole, jax.tree.map(lambda x: x[:, whole:], inputs))
        made = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), made, last)
    return cache, made
