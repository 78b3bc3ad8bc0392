"""Whether speculation leaves the bits of plain reading in the states of recurrent layers.

`compare` goes along random texts in passes of one width: in one reading some of the drafts of each
pass are accepted, in the other one token is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import LinenModel, Transformer, TransformerConfig
from specjax.models.mixers.gated_delta import GatedDelta
from specjax.models.mixers.kimi_delta import KimiDelta
from specjax.models.mixers.mamba2 import Mamba2
from specjax.models.mixers.short_conv import ShortConv

VOCAB, ROWS, CAPACITY, PASSES = 23, 8, 60, 5
MIXERS = {
    "gated delta net": GatedDelta(2, 4, 16, 12, 4),
    "kimi delta": KimiDelta(2, 16, 4),
    "mamba2": Mamba2(4, 16, 12, 2),
    "short convolution": ShortConv(32),
}
TREE = (-1, 0, 0, 1, 2, 4, 2)
"""The parent of each node."""

ANCESTORS = np.zeros((len(TREE), len(TREE)), bool)
for node, parent in enumerate(TREE):
    ANCESTORS[node] = ANCESTORS[parent] if parent >= 0 else False
    ANCESTORS[node, node] = True


def made(mixers: tuple[Any, ...], exact: bool) -> tuple[LinenModel, Any]:
    """A model with these mixers, and random parameters; gates and small vectors too."""
    config = TransformerConfig(
        vocab_size=VOCAB, hidden_size=32, mlp_size=48, num_layers=len(mixers), num_heads=2,
        num_kv_heads=1, head_dim=8, max_positions=CAPACITY, init_scale=0.3, mixers=mixers,
        exact_states=exact,
    )  # fmt: skip
    model = LinenModel(Transformer(config))
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def drawn(x: Any) -> Any:
        return x + 0.3 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 else x

    return model, jax.tree.map(drawn, model.init(jax.random.key(0)))


def compare(name: str, is_tree: bool, exact: bool = True) -> tuple[int, int]:
    """How many rows were compared, and in how many a state or an output has other bits."""
    model, params = made((MIXERS[name],) * 2, exact)
    width = len(TREE)

    def one_pass(params: Any, cache: Any, tokens: Any, count: Any, path: Any, tree: bool) -> Any:
        depth = ANCESTORS.sum(1) - 1 if tree else np.arange(width)
        mask = jnp.asarray(ANCESTORS)[None] if tree else None
        out = model.apply(params, tokens, cache.length[:, None] + depth, cache, mask)
        return out.staged.commit(count, path) if tree else out.staged.commit(count), out.hidden

    passed = jax.jit(one_pass, static_argnums=5)
    rng = np.random.default_rng(0)
    texts: list[list[int]] = [[] for _ in range(ROWS)]
    found: list[list[bytes]] = [[] for _ in range(ROWS)]
    cache = model.init_cache(ROWS, CAPACITY)
    for _ in range(PASSES):
        tokens = rng.integers(0, VOCAB, (ROWS, width))
        paths, counts = np.zeros((ROWS, 4), int), np.zeros(ROWS, int)
        for row in range(ROWS):
            end = rng.integers(0, width if is_tree else 5)
            path = np.flatnonzero(ANCESTORS[end]) if is_tree else np.arange(end)
            counts[row], paths[row, : len(path)] = len(path), path
            texts[row] += list(tokens[row, path])
        kept = jnp.asarray(counts), jnp.asarray(paths)
        cache, hidden = passed(params, cache, jnp.asarray(tokens), *kept, is_tree)
        for row, count in enumerate(counts):
            found[row] += [x.tobytes() for x in np.asarray(hidden[row])[paths[row, :count]]]
    plain, wanted = model.init_cache(ROWS, CAPACITY), [[] for _ in range(ROWS)]
    nothing = jnp.zeros((ROWS, 4), int)
    for at in range(max(map(len, texts))):
        tokens = rng.integers(0, VOCAB, (ROWS, width))
        going = np.array([at < len(text) for text in texts])
        for row in np.flatnonzero(going):
            tokens[row, 0] = texts[row][at]
        count = jnp.asarray(going.astype(int))
        plain, hidden = passed(params, plain, jnp.asarray(tokens), count, nothing, False)
        for row in np.flatnonzero(going):
            wanted[row].append(np.asarray(hidden[row, 0]).tobytes())
    wrong = sum(
        found[row] != wanted[row] or bits(cache, row) != bits(plain, row) for row in range(ROWS)
    )
    assert min(map(len, texts)) > 3
    return ROWS, wrong


def bits(cache: Any, row: int) -> bytes:
    """The bytes of all states of a row."""
    states = [dataclasses.replace(state, staged=None) for state in cache.states]
    return b"".join(np.asarray(leaf[row]).tobytes() for leaf in jax.tree.leaves(states))
