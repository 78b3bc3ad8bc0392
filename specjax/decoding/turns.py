"""`Turns`: reads more of a text into a row that has decoded before.

    turn 1    [ prompt ][ reply ]
    turn 2    [ prompt ][ reply ][ new ]     only the new tokens are read

The last token of a text is pending, as everywhere: it is read with the next turn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax._internal.jit_cache import programs, structure_of
from specjax.caches import empty_cache, kept, positions_of, restored
from specjax.contract import Cache
from specjax.decoding.inputs import RowInputs
from specjax.decoding.prefill import Parts, begin, slots_ahead
from specjax.parallel import device_bytes, devices_of, require
from specjax.types import ArrayTree, Block, DecodeState, Params

WIDTHS = (16, 64, 256)
"""The tokens of a pass over new text: the narrowest that holds what is left."""

WIDEST_TURN = WIDTHS[-1]
"""The most tokens of such a pass, for which a decoder needs room behind the text (256)."""


@struct.dataclass
class Held:
    """What a target and a proposer keep of the committed tokens of a row."""

    cache: Cache
    proposer: ArrayTree


def _shape(*arguments: Any) -> tuple[object, ...]:
    shapes = tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(arguments[1:]))
    return structure_of(arguments), shapes


@dataclasses.dataclass(frozen=True)
class Turns:
    """The operations of a decoder on one row whose text comes in turns.

    The decoder's capacity has room for the text and for a pass of the greatest of `WIDTHS`.
    """

    decoder: Parts

    def empty(self, params: Params, documents: np.ndarray | None) -> Held:
        """Returns a row before its text; `documents` is [1, X] int32, as in `Block.documents`."""
        return _empty(self.decoder, params, documents)

    def check_memory(self, params: Params, documents: np.ndarray | None) -> None:
        """Raises ValueError if the caches of a row do not fit, before anything is allocated."""
        needed = device_bytes(_shapes(_empty, self.decoder, params, documents), None)
        what = f"one row with a capacity of {self.decoder.capacity} tokens"
        require(needed, devices_of(params.target), what, "pass a smaller capacity=")

    def read(self, params: Params, held: Held, tokens: np.ndarray) -> Held:
        """Reads tokens [n] after those that are committed; `held` is donated."""
        for start in range(0, len(tokens), WIDTHS[-1]):
            some = tokens[start : start + WIDTHS[-1]]
            padded = np.zeros((1, next(w for w in WIDTHS if w >= len(some))), np.int32)
            padded[0, : len(some)] = some
            count = np.array([len(some)], np.int32)
            held = _read(self.decoder, params, held, padded, count)
        return held

    def caught_up(self, params: Params, held: Held) -> Held | None:
        """Returns a row that has decoded as `read` leaves it; None if its proposer cannot."""
        if _shapes(_caught_up, self.decoder, params, held) is None:
            return None
        return _caught_up(self.decoder, params, held)

    def cuts(self, held: Held) -> bool:
        """Returns whether a row can be cut after any of its tokens."""
        return _shapes(_first, self.decoder, held, np.ones(1, np.int32)) is not None

    def first(self, held: Held, count: int) -> Held:
        """Returns a row with only its first `count` tokens, where `cuts` is true."""
        cut = _first(self.decoder, held, np.array([count], np.int32))
        assert cut is not None
        return cut

    def begin(self, held: Held, inputs: RowInputs) -> DecodeState:
        """Returns the state of a row that has read its prompt."""
        return _begin(self.decoder, held, inputs)

    def snapshot(self, held: Held) -> Held:
        """Returns a copy of what `gone_back` needs besides later keys and values."""
        return _snapshot(held)

    def gone_back(self, before: Held, later: Held) -> Held:
        """Returns the row of which `before` is a snapshot, in the arrays of a later one."""
        return restored(_copied(before), later)


@programs(static=1, shape=_shape)
def _empty(decoder: Parts, params: Params, documents: Array | np.ndarray | None) -> Held:
    cache = empty_cache(decoder.target, 1, decoder.capacity, slots_ahead(decoder.proposer))
    token, taps = jnp.zeros((1, 1), jnp.int32), decoder.proposer.taps
    out = jax.eval_shape(
        lambda: decoder.target.apply(params.target, token, token, cache, taps=taps)
    )
    hidden, features = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), (out.hidden, out.features)
    )
    looked_up = None if documents is None else jnp.asarray(documents)
    block = Block(token, hidden, jnp.zeros(1, jnp.int32), features, looked_up, whole=False)
    return Held(cache, decoder.proposer.init(params.proposer, block, decoder.capacity))


@programs(static=1, shape=_shape, donate=(2,))
def _read(
    decoder: Parts,
    params: Params,
    held: Held,
    tokens: Array | np.ndarray,
    count: Array | np.ndarray,
) -> Held:
    """Reads the first `count` [1] of `tokens` [1, W] after those that are committed."""
    tokens, count = jnp.asarray(tokens), jnp.asarray(count)
    at = positions_of(decoder.target, held.cache.length, tokens.shape[1], count)
    proposer = decoder.proposer
    out = decoder.target.apply(params.target, tokens, at, held.cache, taps=proposer.taps)
    cache = out.staged.commit(count)
    block = Block(tokens, out.hidden, count, out.features, None, whole=False, cache=cache)
    return Held(cache, proposer.read(params.proposer, held.proposer, block))


@programs(static=1, shape=_shape, donate=(2,))
def _caught_up(decoder: Parts, params: Params, held: Held) -> Held | None:
    made = decoder.proposer.catch_up(params.proposer, held.proposer)
    return None if made is None else Held(held.cache, made)


@programs(static=1, shape=_shape, donate=(1,))
def _first(decoder: Parts, held: Held, count: Array | np.ndarray) -> Held | None:
    if decoder.proposer.taps:  # the features of these tokens are gone
        return None
    count = jnp.asarray(count)
    cache = held.cache.truncate(count)
    made = decoder.proposer.truncate(held.proposer, count, None)
    return None if cache is None or made is None else Held(cache, made)


@programs(static=0, shape=_shape)
def _snapshot(held: Held) -> Held:
    return jax.tree.map(jnp.copy, kept(held))


_copied = jax.jit(lambda held: jax.tree.map(jnp.copy, held))


@programs(static=1, shape=_shape, donate=(1,))
def _begin(decoder: Parts, held: Held, inputs: RowInputs) -> DecodeState:
    return begin(decoder, held.cache, held.proposer, inputs)


def _shapes(program: Any, decoder: Parts, *arguments: Any) -> Any:
    """Returns the shapes of what a program returns; it runs nothing."""
    return jax.eval_shape(lambda *traced: program(decoder, *traced), *arguments)
