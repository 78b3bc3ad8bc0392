"""Functions as models: with a cache, or without one, where every pass reads the whole text.

Without a cache the function takes `(params, tokens [B, T])` and returns logits [B, T, V]; it must
be causal.  With a cache it is a pass of `contract.Model`:

    def apply(params, tokens, positions, cache, mask):
        return logits, cache

  * `tokens` and `positions` are [B, N], `logits` [B, N, V]; a row is a text of its own.
  * Token n attends to the committed tokens of its row, and to each of the N tokens m for which
    `mask[b, n, m]` is True, itself included.  A `mask` of None is causal (m <= n).
    `caches.visible_slots` converts this to slots.
  * The keys and values (or states) of the N tokens are staged after the committed tokens, in any
    `contract.Cache`: `caches.stage` writes keys and values for a `KVCache`, and
    `RecurrentCache.stage` takes states.  The length does not change.

Both may return hidden states [B, N, E] after the logits, for heads that are trained on them;
otherwise E is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import stage
from specjax.contract import Cache, Model, refuse_path, refuse_taps
from specjax.types import ArrayTree, ModelOutput


@struct.dataclass
class TextCache(Cache):
    """A cache that holds the tokens themselves."""

    tokens: Array  # [B, S] int32
    length: Array  # [B] int32

    keeps_scratch = True

    def commit(self, count: Array, path: Array | None = None) -> Self:
        refuse_path(path)
        return dataclasses.replace(self, length=self.length + count)

    def rewind(self, to: Cache) -> Self:
        return dataclasses.replace(self, length=to.length)


@dataclasses.dataclass(frozen=True)
class RereadingModel(Model[ArrayTree, Cache]):
    """A model without a cache, exact but slow: each pass reads the whole buffer again."""

    function: Callable[..., Any]  # (params, tokens [B, T]) -> logits, or (logits, hidden)
    vocab_size: int
    max_positions: int

    reads_trees = False

    def __post_init__(self) -> None:
        _check(self)

    def init_cache(self, batch: int, size: int) -> Cache:
        return TextCache(jnp.zeros((batch, size), jnp.int32), jnp.zeros(batch, jnp.int32))

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput[Cache]:
        """Runs one pass as `contract.Model.apply`, but does not use `positions`."""
        refuse_taps(taps)
        if mask is not None:
            raise ValueError(
                "a model without a cache reads chains only; to read trees, pass init_cache="
            )
        if cache is None:
            return self._read(params, tokens)
        assert isinstance(cache, TextCache)  # what `init_cache` makes
        text = stage(cache.tokens[:, None, :, None], tokens[:, None, :, None], cache.length)[
            :, 0, :, 0
        ]
        # Staged tokens may lie after the last position; those are never committed.
        width = min(text.shape[1], self.max_positions)
        out = self._read(params, text[:, :width])
        at = jnp.minimum(cache.length[:, None] + jnp.arange(tokens.shape[1]), width - 1)
        logits, hidden = (jax.vmap(lambda row, n: row[n])(x, at) for x in (out.logits, out.hidden))
        return ModelOutput(logits, hidden, TextCache(text, cache.length))

    def _read(self, params: ArrayTree, tokens: Array) -> ModelOutput[Cache]:
        out = self.function(params, tokens)
        logits, *hidden = out if isinstance(out, tuple) else (out,)
        return _output(self, tokens, logits, hidden, None)


@dataclasses.dataclass(frozen=True)
class CachedModel(Model[ArrayTree, Cache]):
    """A model with a cache, at full speed: each pass reads only the new tokens.

    It reads trees if its cache commits paths and the function applies the mask (`reads_trees`).
    """

    # (params, tokens, positions, cache, mask) -> (logits, cache) or (logits, hidden, cache)
    function: Callable[..., Any]
    vocab_size: int
    max_positions: int
    make_cache: Callable[[int, int], Cache]
    reads_trees: bool

    def __post_init__(self) -> None:
        _check(self)

    def init_cache(self, batch: int, size: int) -> Cache:
        return self.make_cache(batch, size)

    def apply(
        self,
        params: ArrayTree,
        tokens: Array,
        positions: Array,
        cache: Cache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput[Cache]:
        """Runs one pass as `contract.Model.apply`."""
        refuse_taps(taps)
        memory = self.init_cache(*tokens.shape) if cache is None else cache
        # Padding may lie after the last position.  No token attends to it, but a NaN that an
        # embedding table returns there would spread.
        positions = jnp.minimum(positions, self.max_positions - 1)
        out = self.function(params, tokens, positions, memory, mask)
        if (
            not isinstance(out, tuple)
            or len(out) not in (2, 3)
            or type(out[-1]) is not type(memory)
        ):
            raise ValueError(
                f"the model returned {_describe(out)}; with a cache it must return (logits, cache) "
                f"or (logits, hidden, cache), where the cache is the {type(memory).__name__} that "
                "it was given"
            )
        logits, *hidden, after = out
        return _output(self, tokens, logits, hidden, None if cache is None else after)


def _check(model: RereadingModel | CachedModel) -> None:
    """Raises ValueError for mistakes that would otherwise fail later and less clearly."""
    for name in ("vocab_size", "max_positions"):
        value = getattr(model, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}; it must be a whole number of at least 1")
    try:
        hash(model)
    except TypeError as error:
        raise ValueError(
            f"the model cannot be a static argument of jit ({error}): arrays belong in the "
            "params, and fields of a module must be hashable"
        ) from None


def _describe(out: object) -> str:
    """Describes the result of a function, for a message."""
    if isinstance(out, tuple):
        return f"({', '.join(map(_describe, out))})"
    shape = getattr(out, "shape", None)
    return f"a {type(out).__name__}" if shape is None else f"an array {list(shape)}"


def _output(
    model: RereadingModel | CachedModel,
    tokens: Array,
    logits: Array,
    hidden: list[Array],
    cache: Cache | None,
) -> ModelOutput[Cache]:
    """Returns the checked output.  Before the check, `logits` may be any value."""
    wanted = (*tokens.shape, model.vocab_size)
    if getattr(logits, "shape", None) != wanted or len(hidden) > 1:
        raise ValueError(
            f"for tokens {list(tokens.shape)} the model returned {_describe((logits, *hidden))}; "
            f"the first must be logits {list(wanted)} [rows, tokens, vocab_size], and there may be "
            "hidden states after them"
        )
    return ModelOutput(
        logits, hidden[0] if hidden else jnp.zeros((*tokens.shape, 0), logits.dtype), cache
    )
