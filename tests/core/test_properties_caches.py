"""Drawn sequences of stage, commit and rewind against a list of tokens, for each kind of cache.

A token is a number of its own, so what a cache holds and what a staged token sees are sets.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from properties import law, parents, seeds

from specjax.caches import KVCache, RecurrentCache, WindowedCache

NODES, DEPTH, CHAIN, PROMPT, WINDOW = 64, 12, 7, 70, 9
"""Nodes and depth of a tree, tokens of a chain and of a pass over a prompt; a window that is
smaller than the tree is deep."""
CAPACITY = 400


def windowed(rows, dtype):
    """One layer with a window and one without; no ring yet."""
    cache = WindowedCache.zeros(2, rows, 1, CAPACITY, 2, dtype)
    return dataclasses.replace(cache, windows=(WINDOW, None))


def ring(rows, dtype):
    """The layer with a window keeps it in a ring, around which the texts go twice."""
    cache = windowed(rows, dtype).narrow(NODES, PROMPT)
    assert cache.rings == (WINDOW + PROMPT, None)
    return cache


def kv(rows, dtype):
    return KVCache.zeros(1, rows, 1, CAPACITY, 2, dtype)


CASES = {
    "kv": (kv, 3, jnp.float32),
    "kv of many rows": (kv, 17, jnp.float32),
    "kv in bfloat16": (kv, 3, jnp.bfloat16),
    "window": (windowed, 3, jnp.float32),
    "ring": (ring, 3, jnp.float32),
    "ring of many rows": (ring, 17, jnp.float32),
    "ring in bfloat16": (ring, 3, jnp.bfloat16),
}
"""Up to 16 rows are written by slices, more by a scatter; bfloat16 is written as integers."""


@jax.jit
def staged(cache, names, depth, mask):
    """Stage tokens `names` [B, N] in every layer: the cache, and what each of them sees [B, N, S].

    A name is written as two digits, which bfloat16 holds exactly.
    """
    digits = jnp.stack([names // 200, names % 200], -1)[:, None].astype(jnp.float32)
    positions = cache.length[:, None] + depth
    keys, values, seen = [], [], []
    for index in range(len(cache.keys)):
        layer = cache.layer(index)
        made = layer.stage(digits, -digits)
        window = cache.windows[index] if isinstance(cache, WindowedCache) else None
        seen.append(layer.visible(positions, mask, window))
        keys, values = [*keys, made[0]], [*values, made[1]]
    return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values)), seen


commit = jax.jit(lambda cache, count: cache.commit(count))
commit_path = jax.jit(lambda cache, count, path: cache.commit(count, path))


class Texts:
    """A cache, and beside it the committed tokens of each row as lists."""

    def __init__(self, cache, rows):
        self.cache, self.texts, self.last = cache, [[] for _ in range(rows)], 0

    def names(self, width):
        """New tokens [B, width], each of another name."""
        shape = (len(self.texts), width)
        made = self.last + 1 + np.arange(np.prod(shape)).reshape(shape)
        self.last = int(made[-1, -1])
        return made.astype(np.int32)

    def stage(self, names, parent=None):
        """Stage, and compare what each token sees with its text and its ancestors."""
        rows, width = names.shape
        ways = [
            [list(range(n + 1)) if parent is None else trees.ancestors(parent[b], n)
             for n in range(width)] for b in range(rows)
        ]  # fmt: skip
        depth = np.array([[len(way) - 1 for way in row] for row in ways], np.int32)
        mask = None
        if parent is not None:
            mask = np.zeros((rows, width, width), bool)
            for b, n in np.ndindex(rows, width):
                mask[b, n, ways[b][n]] = True
        self.cache, seen = staged(self.cache, names, depth, mask)
        keys, values, seen = jax.device_get((self.cache.keys, self.cache.values, seen))
        windows = getattr(self.cache, "windows", (None,))
        for window, key, value, visible in zip(windows, keys, values, seen, strict=True):
            np.testing.assert_array_equal(key, -value)
            digits = key[:, 0].astype(np.int64)
            held = digits[..., 0] * 200 + digits[..., 1]
            for b, n in np.ndindex(rows, width):
                whole = [*self.texts[b], *names[b, ways[b][n]].tolist()]
                wanted = whole if window is None else whole[-window:]
                assert sorted(held[b, visible[b, n]].tolist()) == sorted(wanted), (b, n)

    def commit(self, kept, path=None):
        """Keep tokens `kept` of each row, which are the first ones or those of `path`."""
        count = np.array(list(map(len, kept)), np.int32)
        self.cache = (
            commit(self.cache, count) if path is None else commit_path(self.cache, count, path)
        )
        for text, more in zip(self.texts, kept, strict=True):
            text += more
        assert self.cache.length.tolist() == list(map(len, self.texts))


def read(texts, rng, width):
    """A pass over a chain, of which each row keeps some first tokens."""
    names = texts.names(width)
    texts.stage(names)
    texts.commit([row[: rng.integers(0, width + 1)].tolist() for row in names])


def speculate(texts, rng, parent):
    """A pass over a tree, of which each row keeps a part of a path."""
    names, rows = texts.names(NODES), len(texts.texts)
    parent = np.stack([np.where(rng.random() < 0.8, parent, -1) for _ in range(rows)])
    texts.stage(names, parent)
    ways = [trees.ancestors(tree, int(rng.choice(connected(tree)))) for tree in parent]
    path = np.array([way + way[-1:] * (DEPTH + 1 - len(way)) for way in ways], np.int32)
    kept = [rng.integers(0, len(way) + 1) for way in ways]
    chosen = [row[way[:n]].tolist() for row, way, n in zip(names, ways, kept, strict=True)]
    texts.commit(chosen, path)


def connected(parent):
    """The nodes below the root, and the root."""
    return [n for n in range(len(parent)) if trees.ancestors(parent, n)[0] == 0]


def draft(texts, rng):
    """A draft model's turn: it reads its own tokens one by one, rewinds, and commits the first of
    them again."""
    before, written = texts.cache, [list(text) for text in texts.texts]
    drafted = []
    for _ in range(4):
        names = texts.names(1)
        texts.stage(names)
        texts.commit(names.tolist())
        drafted.append(names[:, 0])
    texts.cache, texts.texts = texts.cache.rewind(before), written
    drafts = np.stack(drafted, 1)
    texts.commit([row[: rng.integers(0, 5)].tolist() for row in drafts])


turns = st.lists(
    st.one_of(st.sampled_from(["draft", "chain", "token"]), parents(NODES, DEPTH, 64)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("case", CASES)
def test_a_cache_is_a_list_of_tokens(case):
    """Whatever is staged, committed by count or by path, and rewound, each row's text is that of
    its list, and a token sees its text and its ancestors, or as much of them as its window."""
    make, rows, dtype = CASES[case]
    longest = 0

    @law(16 if rows == 3 else 6)
    @given(turns=turns, prompts=st.integers(0, 2), seed=seeds)
    def check(turns, prompts, seed):
        nonlocal longest
        rng, texts = np.random.default_rng(seed), Texts(make(rows, dtype), rows)
        for _ in range(prompts):
            read(texts, rng, PROMPT)
        for turn in turns:
            if isinstance(turn, np.ndarray):
                speculate(texts, rng, turn)
            elif turn == "draft":
                draft(texts, rng)
            else:
                read(texts, rng, CHAIN if turn == "chain" else 1)
        texts.stage(texts.names(1))
        longest = max(longest, *map(len, texts.texts))

    check()
    assert longest > WINDOW + PROMPT, "the ring turns"


@functools.partial(jax.jit)
def fold(cache, names):
    """A recurrent pass: the state after a token depends on all before it and on their order."""
    _, cache = cache.scan(lambda state, name: (state * 31 + name, state), names)
    return cache


def folded(text):
    state = 0
    for name in text:
        state = (state * 31 + name) & 0xFFFFFFFF
    return state


def test_a_recurrent_cache_is_a_list_of_tokens():
    """The state is that after the committed tokens, also after a rewind."""

    @law(60)
    @given(turns=st.lists(st.tuples(st.booleans(), st.sampled_from([1, CHAIN])), max_size=8),
           seed=seeds)  # fmt: skip
    def check(turns, seed):
        rng, rows = np.random.default_rng(seed), 3
        cache, texts = RecurrentCache.create(jnp.zeros(rows, jnp.uint32)), [[] for _ in range(rows)]
        for rewound, width in turns:
            names = rng.integers(0, 1000, (rows, width)).astype(np.uint32)
            count = rng.integers(0, width + 1, rows).astype(np.int32)
            if rewound:  # everything is committed, taken back, and read again
                cache = commit(fold(cache, names), np.full(rows, width, np.int32)).rewind(cache)
                names = names[:, ::-1]
            cache = commit(fold(cache, names), count)
            for text, row, kept in zip(texts, names, count, strict=True):
                text += row[:kept].tolist()
            assert cache.state.tolist() == [folded(text) for text in texts]
            assert cache.length.tolist() == list(map(len, texts))

    check()
