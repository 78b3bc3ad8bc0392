"""Reads a prompt chunk by chunk, into the target and into the proposers that read prompts.

    prompt     . . . . . . . . . . .|.        the last token is pending: nothing reads it
    chunks     [ whole ][ whole ][ ]          the last one is as narrow as it may be

The bounds of the chunks depend only on the length of the prompt.  So a prompt is read with the same
bits whatever else is served, and a whole chunk at the beginning of two prompts has the same keys
and values in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax.caches import empty_cache, positions_of
from specjax.contract import ArrayTree, Cache, Model
from specjax.decoding import slots_ahead
from specjax.serve.per_row import PerRow
from specjax.types import Block, Params

_NARROWEST, _WIDE = 8, 128
"""The tokens of the narrowest pass, on one CPU and elsewhere.  By its roofline an accelerator needs
as long for one token as for 128, since it reads all weights for either.  On a mesh of CPU devices
short prompts take longer in the wide pass, and fewer programs are compiled.
"""


@struct.dataclass
class Reading:
    """The state of rows whose prompts are being read; mostly of one."""

    cache: Cache  # the target's
    own: tuple[ArrayTree, ...]  # the state of each part
    ends: Array | None  # [B, C, sum E], as in `SeveralState`


def widths(chunk: int, cpu: bool = True) -> tuple[int, ...]:
    """Returns the widths of the passes over a prompt, ascending, each of which is compiled.

    Args:
      chunk: the greatest.
      cpu: the model is on a single CPU.
    """
    least = _NARROWEST if cpu else _WIDE
    narrower = {w for w in (chunk >> n for n in (1, 2, 3)) if w >= least}
    if cpu and chunk >= _WIDE:  # a pass of so many tokens costs what it computes
        narrower.add(3 * chunk // 4)
    return tuple(sorted({chunk, *narrower}))


def passes(start: int, count: int, widths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Returns start, number of tokens and width of each pass over tokens `start` to `count`."""
    chunk = widths[-1]
    for at in range(start, count, chunk):
        tokens = min(chunk, count - at)
        yield at, tokens, next(width for width in widths if width >= tokens)


def padded(
    chunks: list[tuple[int, np.ndarray]], width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tokens [B, W] of chunks, where each begins [B], and how many it has [B]."""
    filled = np.zeros((len(chunks), width), np.int32)
    for row, (_, tokens) in zip(filled, chunks, strict=True):
        row[: len(tokens)] = tokens
    starts = np.array([start for start, _ in chunks], np.int32)
    return filled, starts, np.array([len(tokens) for _, tokens in chunks], np.int32)


def prompt_passes(
    start: int, tokens: np.ndarray, widths: tuple[int, ...]
) -> list[tuple[int, np.ndarray, int]]:
    """Returns start, number of tokens and width of each pass over a prompt from `start` on."""
    return [
        (at, tokens[at : at + count], width)
        for at, count, width in passes(start, len(tokens) - 1, widths)
    ]


@dataclasses.dataclass(frozen=True)
class Reader:
    """The operations of a decoder on one row's `Reading`.

    Attributes:
      capacity: slots for tokens, a multiple of `chunk`.
      chunk: tokens of a whole chunk.
    """

    target: Model
    several: PerRow
    capacity: int
    chunk: int

    def empty(self, params: Params) -> Reading:
        """Returns the reading of a row before its prompt."""
        cache = empty_cache(self.target, 1, self.capacity, slots_ahead(self.several))
        tokens = jnp.zeros((1, 1), jnp.int32)
        out = self._apply(params, tokens, jnp.zeros((1, 1), jnp.int32), cache)
        block = Block(tokens, out.hidden, jnp.zeros(1, jnp.int32), out.features)
        ends = None
        if out.features is not None:
            size = 1, self.capacity // self.chunk, out.features.shape[-1]
            ends = jnp.zeros(size, out.features.dtype)
        state = self.several.init(params.proposer, block, self.capacity)
        return Reading(cache, state.own, ends)

    def read(
        self,
        params: Params,
        reading: Reading,
        tokens: Array,
        start: Array,
        count: Array,
        uses: Array,
    ) -> Reading:
        """Reads the first `count` [B] of `tokens` [B, W], which begin at `start` [B] of the texts.

        Args:
          uses: [parts] bool, the proposers that read.
        """
        at = positions_of(self.target, start, tokens.shape[1], count)
        out = self._apply(params, tokens, at, reading.cache)
        cache = out.staged.commit(count)
        block = Block(tokens, out.hidden, count, out.features, cache=cache)
        own = tuple(
            self._read_part(n, params, state, block, uses[n]) for n, state in enumerate(reading.own)
        )
        ends = reading.ends
        if ends is not None and out.features is not None:
            rows = jnp.arange(len(tokens))
            last = out.features[rows, jnp.maximum(count - 1, 0)]
            index = rows, start // self.chunk
            ends = ends.at[index].set(last.astype(ends.dtype), mode="drop")
        return Reading(cache, own, ends)

    def first(self, reading: Reading, count: Array) -> Reading | None:
        """Returns the reading of a row after the first `count` tokens of another one's prompt.

        Args:
          reading: the present state of that row, which may have decoded further.
          count: [], a multiple of `chunk`.

        Returns:
          The reading, or None if the target's cache or a proposer cannot be truncated.
        """
        cache, count = reading.cache.truncate(count[None]), count[None]
        last = None
        if reading.ends is not None:
            last = jnp.take(reading.ends, jnp.maximum(count // self.chunk - 1, 0), axis=1)[:, 0]
        own = tuple(
            part.truncate(state, count, self.several.features(n, last))
            for n, (part, state) in enumerate(zip(self.several.parts, reading.own, strict=True))
        )
        if cache is None or any(state is None for state in own):
            return None
        return Reading(cache, own, reading.ends)

    def _apply(self, params: Params, tokens: Array, positions: Array, cache: Cache):
        return self.target.apply(params.target, tokens, positions, cache, taps=self.several.taps)

    def _read_part(
        self, index: int, params: Params, state: ArrayTree, block: Block, wanted: Array
    ) -> ArrayTree:
        """Returns the state of a proposer after more of the prompt; unchanged unless `wanted`."""
        part, own = self.several.parts[index], params.proposer[index]
        seen = self.several.seen(index, block)

        def turn(carry: tuple[Array, ArrayTree]) -> tuple[Array, ArrayTree]:
            return jnp.zeros_like(carry[0]), part.read(own, carry[1], seen)

        return jax.lax.while_loop(lambda carry: carry[0], turn, (wanted, state))[1]
