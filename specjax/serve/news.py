"""`News`: what the host learns of the slots of a batch after a turn, in one small array.

    counts | length, done | the new tokens, and what follows them | their origins

`peeked` makes a line of numbers for each slot on the device, and `news_of` reads them on the host.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.decoding import Logprobs
from specjax.serve.per_row import SeveralState
from specjax.types import Stats

_COUNTS = len(dataclasses.fields(Stats))


@dataclasses.dataclass(frozen=True)
class News:
    """The new tokens of one slot."""

    length: int
    done: bool
    tokens: list[int]
    origin: list[int]
    counts: tuple[int, ...]  # the fields of `Stats`, in their order


def peeked(
    window: int,
    state: tuple[Array, Array, Array, Stats, SeveralState],
    length: Array,
    written: Array,
) -> Array:
    """Returns the lines [B, counts + 2 + 2 * window] int32, on the device.

    Args:
      window: the most new tokens of a slot.
      state: its tokens [B, L], lengths [B], which rows are done [B], counts and proposers.
      length: [B], of each row as the host knows it.
      written: [B], the new tokens of each row as the host knows them.
    """
    tokens, now, done, stats, several = state

    def cut(buffer: Array, start: Array) -> Array:
        at = jnp.minimum(start[:, None] + jnp.arange(window), buffer.shape[1] - 1)
        return jnp.take_along_axis(buffer, at, axis=1)

    numbers = jnp.stack([*jax.tree.leaves(stats), now, done.astype(jnp.int32)], axis=1)
    news = [numbers, cut(tokens, length), cut(several.origin, written)]
    return jnp.concatenate(news, axis=1)


def news_of(lines: np.ndarray, length: np.ndarray) -> list[News]:
    """Returns the news of each slot, from the lines of `peeked` and the same `length` [B]."""
    made, numbers = [], lines[:, : _COUNTS + 2].tolist()
    half = (lines.shape[1] - _COUNTS - 2) // 2
    for before, (*counts, now, done), line in zip(length.tolist(), numbers, lines, strict=True):
        window = line[_COUNTS + 2 :]
        # Only the new tokens become lists, since the window has room for many more.
        tokens, origin = (x[: now - before].tolist() for x in (window, window[half:]))
        made.append(News(now, bool(done), tokens, origin, tuple(counts)))
    return made


def recorded(window: int, logprobs: Logprobs, slot: Array, start: Array) -> Logprobs:
    """Returns the log-probabilities of `window` tokens of a slot, from `start` of its text on."""
    at = start + jnp.arange(window)
    return jax.tree.map(lambda leaf: leaf[slot, jnp.minimum(at, leaf.shape[1] - 1)], logprobs)
