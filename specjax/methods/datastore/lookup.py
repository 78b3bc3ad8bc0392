"""Predicts continuations of a context, from a datastore and from earlier tokens of a row's text.

The token at a position of the datastore's corpus is the *continuation* of its *context*, the tokens
before it, read backwards.  Positions are sorted by their contexts:

    order     context, read backwards     continuation
      7       "b" "a" "x" ...             "c"
      3       "b" "a" "y" ...             "c"
     12       "b" "d" "a" ...             "a"

So the positions that agree with a context in its last n tokens are one range, for every n, and the
longest agreement is at the positions around the one where the context itself belongs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from specjax import sampling

DEPTH = 16
"""Tokens of its context by which a position of the corpus is sorted."""

NONE = -2
"""A token id that marks a missing token in a context.  No text and no corpus contains it."""

_SHORT = 3  # contexts of up to so many tokens are counted in whole ranges
_SAMPLE = 128  # positions of a range
_LONG = (4, 8)  # contexts of these lengths are counted in the window
_WINDOW = 64  # positions around that of the context
_OWN = 16  # positions of the row's own text
_OWN_LONGEST = 8  # tokens by which positions of the own text are compared
_PIVOTS = 32  # positions with which each round of the search compares; XLA:CPU adds up 32 at once
_DOUBT = 6.0  # how much more a kind of token weighs in the datastore than in the own text
_TABLE = 1024  # for counting distinct tokens; two of them may fall on one entry


_OWN_LEVELS = np.arange(1, _OWN_LONGEST + 1)
_ORDER = [*range(1, _SHORT + 1), *_LONG, *(_OWN_LEVELS + 0.5)]
"""The order of the levels, the greatest last: for each n the own text is above the datastore."""
_IS_ABOVE = np.array(_ORDER) > np.array(_ORDER)[:, None]
_DOUBTS = np.array([_DOUBT] * (_SHORT + len(_LONG)) + [1.0] * _OWN_LONGEST, np.float32)


@struct.dataclass
class DatastoreParams:
    """A datastore on a device.  With equal shapes another datastore is the same program."""

    tokens: Array  # [DEPTH + C] uint16 or uint32; the corpus, after DEPTH of padding
    order: Array  # [C] int32; positions sorted by their contexts
    starts: Array  # [V + 1] int32; the contexts order[starts[v]:starts[v + 1]] end with token v
    prior: Array  # [V] float32; the probability of a token without any context


def look_up(store: DatastoreParams, context: Array, text: Array, length: Array) -> Array:
    """Returns log-probabilities [V] of the token after a context.

    For n = 1, 2, ... the continuations of the positions that agree in n tokens give a distribution,
    which is mixed with that of the smaller n: p <- (c + d T p) / (N + d T).  Here c counts a token
    among these continuations, N is their number, and T the number of distinct tokens among them;
    before n = 1, p is the prior.  For each n the datastore is mixed in first, and then the row's
    own text, which therefore has more weight.

    With d = 1 this is method C of Witten and Bell.  In the datastore d is greater: a target's
    distribution is smoother than the counts of few positions.

    Args:
      store: the datastore.
      context: [DEPTH] int32, the last token first, padded with NONE.
      text: [L] int32, the row's own documents and text.
      length: [] its tokens; the last of them is the first of `context` before any drafts.

    Reference: Witten and Bell 1991, "The zero-frequency problem", IEEE Transactions on Information
    Theory 37(4), method C; the mixture of orders is that of Bell, Cleary and Witten 1990, "Text
    Compression".
    """
    low, high, at = _ranges(store, context)
    width = jnp.minimum(high - low, _SAMPLE)
    short, near, agree = _places(store, context, low, high, width, at)
    own, same = _own_places(context, text, length)

    # One row for each level: those of the ranges, of the window and of the own text.
    is_short = jnp.arange(_SAMPLE) < width[:, None]
    is_near, is_own = agree >= jnp.array(_LONG)[:, None], same >= _OWN_LEVELS[:, None]
    number = jnp.concatenate([width, is_near.sum(1), is_own.sum(1)]).astype(jnp.float32)
    kinds = _DOUBTS * _distinct(short, is_short, near, agree, own, same)
    total = jnp.maximum(number + kinds, 1)
    kept = jnp.where(number > 0, kinds / total, 1)
    above = jnp.prod(jnp.where(_IS_ABOVE, kept, 1), axis=1)
    share = jnp.where(number > 0, above / total, 0)
    by_short, by_near, by_own = jnp.split(share[:, None], (_SHORT, _SHORT + len(_LONG)))

    tokens = jnp.concatenate([short.ravel(), near, own])
    weights = [
        jnp.where(is_short, by_short, 0).ravel(),
        jnp.where(is_near, by_near, 0).sum(0),
        jnp.where(is_own, by_own, 0).sum(0),
    ]
    return jnp.log((kept.prod() * store.prior).at[tokens].add(jnp.concatenate(weights)))


def _distinct(
    short: Array, is_short: Array, near: Array, agree: Array, own: Array, same: Array
) -> Array:
    """Returns the number of distinct tokens of each level."""
    row = jnp.arange(_SHORT)[:, None]
    at = [(row * _TABLE + short % _TABLE).ravel()]
    at += [_SHORT * _TABLE + near % _TABLE, (_SHORT + 1) * _TABLE + own % _TABLE]
    at = jnp.concatenate(at)
    agreement = jnp.concatenate([is_short.ravel().astype(jnp.int32), agree, same])
    # Of the votes for one token, that of the greatest agreement counts, and of equal ones the last.
    value = agreement * len(at) + jnp.arange(len(at), dtype=jnp.int32)
    table = jnp.zeros((_SHORT + 2) * _TABLE, jnp.int32).at[at].max(value)
    counts = table[at] == value
    ranges, window, text = jnp.split(counts, (short.size, short.size + _WINDOW))
    return jnp.concatenate(
        [
            (ranges.reshape(short.shape) & is_short).sum(1),
            (window & (agree >= jnp.array(_LONG)[:, None])).sum(1),
            (text & (same >= _OWN_LEVELS[:, None])).sum(1),
        ]
    ).astype(jnp.float32)


def _ranges(store: DatastoreParams, context: Array) -> tuple[Array, Array, Array]:
    """Finds the range of positions that agree with a context.

    Each round compares with positions that cut the rest of the order into equal sections, since a
    few wide rounds are faster than many narrow ones.

    Returns:
      The first position and the end of the range that agrees in n tokens, for n = 1 ... _SHORT:
        both [_SHORT].  And the index [] at which the context itself would be inserted.
    """
    first, end = store.starts[context[0]], store.starts[context[0] + 1]
    # The searches: for the whole context, then for the first place of each range, then for its end.
    ranges = 2 * (_SHORT - 1)
    low, high = jnp.full(1 + ranges, first), jnp.full(1 + ranges, end)
    is_end = jnp.arange(1 + ranges) > _SHORT - 1
    most = len(store.order)
    # The first token that differs decides, so its sign weighs more than those of all others.
    weight = 1 << jnp.arange(DEPTH - 2, -1, -1)
    in_range = jnp.arange(_SHORT - 1) <= jnp.tile(jnp.arange(_SHORT - 1), 2)[:, None]

    def compare(place: Array, weight: Array) -> Array:
        """Returns whether each position's context is before (< 0), equal to (0) or after ours."""
        number = weight.shape[-1]
        back = jnp.arange(1, number + 1)  # the last tokens of all these positions are equal
        token = store.tokens[place[..., None] - back].astype(jnp.int32)
        ours = context[1 : number + 1]
        sign = (token > ours).astype(jnp.int32) - (token < ours).astype(jnp.int32)
        return jnp.sum(sign * weight, axis=-1)

    def between(low: Array, width: Array, part: Array) -> Array:
        return _divided(low, width, part, jnp.int32(_PIVOTS + 1))

    while most > 0:
        most //= _PIVOTS + 1
        width = high - low
        pivot = between(low[:, None], width[:, None], jnp.arange(1, _PIVOTS + 1, dtype=jnp.int32))
        place = store.order[jnp.minimum(pivot, len(store.order) - 1)] + (DEPTH - 1)
        order = jnp.concatenate(
            [
                compare(place[:1], weight),
                compare(place[1:], jnp.where(in_range, weight[: _SHORT - 1], 0)[:, None]),
            ]
        )
        passed = ((order < 0) | ((order == 0) & is_end[:, None])) & (pivot < high[:, None])
        # Pivots ascend, so those that are passed are the first ones.
        number = passed.sum(1, dtype=jnp.int32)
        above = jnp.where(number < _PIVOTS, between(low, width, number + 1), high)
        low = jnp.where(number > 0, between(low, width, number) + 1, low)
        high = jnp.maximum(jnp.minimum(above, high), low)
    at, lows, ends = jnp.split(low, (1, _SHORT))
    return jnp.append(first, lows), jnp.append(end, ends), at[0]


def _divided(low: Array, width: Array, part: Array, parts: Array) -> Array:
    """Computes low + width * part / parts within 32 bits.  No number is negative."""
    step = jax.lax.div(width, jnp.broadcast_to(parts, width.shape))
    rest = part * (width - step * parts)
    return low + part * step + jax.lax.div(rest, jnp.broadcast_to(parts, rest.shape))


def _places(
    store: DatastoreParams, context: Array, low: Array, high: Array, number: Array, at: Array
) -> tuple[Array, Array, Array]:
    """Returns the continuations at positions of the datastore.

    Returns:
      The continuations at `number` [_SHORT] equally spaced positions of each range [_SHORT,
      _SAMPLE], those at the positions around `at` [_WINDOW], and the number of tokens that agree
      there [_WINDOW].
    """
    parts, part = jnp.maximum(number, 1)[:, None], jnp.arange(_SAMPLE, dtype=jnp.int32)
    spread = _divided(low[:, None], (high - low)[:, None], part, parts)
    around = jnp.clip(at - _WINDOW // 2, low[0], jnp.maximum(high[0] - _WINDOW, low[0]))
    around += jnp.arange(_WINDOW)
    index = jnp.concatenate([spread.ravel(), around])
    place = store.order[jnp.minimum(index, len(store.order) - 1)] + DEPTH
    token = store.tokens[place].astype(jnp.int32)
    short, near = token[:-_WINDOW].reshape(_SHORT, _SAMPLE), token[-_WINDOW:]
    back = jnp.arange(max(_LONG))
    equal = store.tokens[place[-_WINDOW:, None] - 1 - back] == context[: max(_LONG)]
    # The first token that differs.
    agree = jnp.min(jnp.where(equal, max(_LONG), back), axis=1)
    return short, near, jnp.where(around < high[0], agree, 0)


def _own_places(context: Array, text: Array, length: Array) -> tuple[Array, Array]:
    """Returns the continuations in the own text that agree longest, latest first, and lengths."""
    slot, follows = jnp.arange(len(text)), jnp.roll(text, -1)
    agrees, count = (slot < length - 1) & (follows >= 0), jnp.zeros_like(slot)
    for back in range(_OWN_LONGEST):
        agrees &= (jnp.roll(text, back) == context[back]) & (slot >= back)
        count += agrees
    # Whole numbers below 2^24, which float32 holds: XLA sorts for the greatest integers.
    value, _ = sampling.top_k((count * len(text) + slot).astype(jnp.float32), min(_OWN, len(text)))
    value = value.astype(jnp.int32)
    return jnp.maximum(follows[value % len(text)], 0), value // len(text)
