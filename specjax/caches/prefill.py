"""Reading a prompt in chunks of a fixed size, so that activations do not grow with its length.

    prompt   . . . . . . . . . . . . . . .      15 tokens, chunks of 4
             [read 0 ][read 1 ][read 2 ][3 ]    each stages behind what the row has committed so far

In chunks the tokens of a pass are bounded, and `models.attention` bounds the slots that it looks at at a time: what is
left to grow are the cache and the features that proposers ask for.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.contract import Model

CHUNK = 512


def empty_cache(model: Model, rows: int, text: int, ahead: int) -> Any:
    """A cache of `model` for texts of up to `text` tokens, with room behind them for the `ahead` that are scratch.

    Where it can be narrowed (`specjax.caches.ring`), a layer with a sliding window keeps that window alone.
    """
    cache = model.init_cache(rows, text + ahead)
    # Not the width of this prompt: rows of any prompt fit each other's batch.
    return cache.narrow(ahead, CHUNK)


def read_prompt(
    model: Model, params: Any, tokens: Array, count: Array, cache: Any, taps: tuple[int, ...] = ()
) -> tuple[Array, Array | None, Any]:
    """Read `tokens` [B, W] from the start of an empty cache, and commit the first `count` [B] of each row.

    Up to `CHUNK` tokens are one pass.  More are a loop of passes of that size, and a shorter one for what is left over.
    A row that has ended stages behind its own length, which is before the chunk, so that it needs no more room.

    Returns:
      The hidden states [B, W, E], the features [B, W, sum E] of the layers in `taps` (None without),
      and the cache.
    """
    named = {"taps": taps} if taps else {}  # a model without taps need not know the word

    def read(cache: Any, start: Array | int, part: Array) -> tuple[Any, tuple[Array, Array | None]]:
        positions = jnp.broadcast_to(start + jnp.arange(part.shape[1]), part.shape)
        out = model.apply(params, part, positions, cache, **named)
        return out.cache.commit(jnp.clip(count - start, 0, part.shape[1])), (
            out.hidden,
            out.features,
        )

    rows, width = tokens.shape
    whole = width // CHUNK * CHUNK
    if width <= CHUNK:
        cache, made = read(cache, 0, tokens)
        return *made, cache
    starts = jnp.arange(0, whole, CHUNK)
    parts = tokens[:, :whole].reshape(rows, -1, CHUNK).swapaxes(0, 1)
    cache, made = jax.lax.scan(lambda cache, chunk: read(cache, *chunk), cache, (starts, parts))
    made = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, whole, -1), made)
    if whole < width:
        cache, last = read(cache, whole, tokens[:, whole:])
        made = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), made, last)
    return *made, cache
