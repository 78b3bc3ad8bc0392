"""Steps of a decoder whose trees are drawn: up to 64 nodes, and any path through them is right.

The proposer takes its trees from its parameters, as arrays, so that all examples run one program.
"""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st
from properties import law, parents, seeds
from toys import TABLES

from specjax import RULES, Decoder, Params, Proposal
from specjax.contract import Proposer

NODES, DEPTH, CAPACITY = 64, 9, 64
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Given(Proposer):
    """Proposes the tree that its parameters are: tokens and parents [B, N]."""

    is_chain = False
    num_nodes = NODES
    max_depth = DEPTH

    def init(self, params, prompt, capacity):
        return None

    def observe(self, params, state, block):
        return None

    def propose(self, params, state, context):
        tokens, parent = params
        return Proposal(tokens.at[:, 0].set(context.pending), parent, None, point_mass=True), state


@functools.cache
def greedy(toys):
    """[B, CAPACITY] the text that the target writes, by reading it again for every token."""
    tokens, length = np.zeros((toys.ROWS, CAPACITY), np.int32), toys.LENGTHS.copy()
    tokens[:, : toys.WIDTH] = toys.PROMPTS
    while (length < CAPACITY).any():
        logits = toys.plain_logits(tokens)
        for row in np.flatnonzero(length < CAPACITY):
            tokens[row, length[row]] = logits[row, length[row] - 1].argmax()
        length = np.minimum(length + 1, CAPACITY)
    return tokens


def drafts(rng, parent, right):
    """A right path in a tree, and tokens [N]: those on the path are `right`, the others are wrong,
    and siblings are distinct."""
    parent, tokens, siblings = parent.tolist(), np.zeros(NODES, np.int32), {}
    ways = [trees.ancestors(parent, node) for node in range(NODES)]
    path = ways[rng.choice([n for n in range(NODES) if ways[n][0] == 0][-8:])]
    for node in range(1, NODES):
        rank = siblings[parent[node]] = siblings.get(parent[node], 0) + 1
        here = [*right, 0][min(max(len(ways[node]) - 2, 0), len(right))]
        tokens[node] = here if node in path else (here + rank) % TABLES.VOCAB
    return path, tokens


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_step_accepts_the_right_path_of_any_tree(rule, toys=TABLES):
    """Each row emits as many tokens as its right path is long and one more; the text and the cache
    stay those of plain greedy decoding."""
    dec = Decoder(toys.model(), Given(), RULES[rule](), (), CAPACITY)
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(dec.step, n=1))
    whole, weights = greedy(toys), toys.weights()
    positions = np.broadcast_to(np.arange(CAPACITY), whole.shape)
    net = toys.model()
    plain = jax.device_get(
        jax.jit(net.apply)(weights, whole, positions, net.init_cache(toys.ROWS, CAPACITY)).cache
    )
    limits = np.full(toys.ROWS, CAPACITY, np.int32)
    start = toys.prefill(dec, Params(weights, (whole[:, :1], whole[:, :1])), limit=limits)
    farthest = 0

    @law(12)
    @given(st.lists(parents(NODES, DEPTH, 8), min_size=STEPS, max_size=STEPS), seeds)
    def check(shapes, seed):
        nonlocal farthest
        rng, state = np.random.default_rng(seed), start
        for parent in shapes:
            length = np.asarray(state.length)
            forest = [np.where(rng.random(NODES) < 0.9, parent, -1) for _ in range(toys.ROWS)]
            made = [
                drafts(rng, tree, text[n : n + DEPTH])
                for tree, text, n in zip(forest, whole, length, strict=True)
            ]
            arrays = Params(weights, (np.array([x for _, x in made]), np.int32(forest)))
            state, info = jax.device_get(step(arrays, state))
            for row in np.flatnonzero(length < CAPACITY):
                path = made[row][0][: CAPACITY - length[row] + 1]
                assert info.num_accepted[row] >= len(path) - 1
                assert info.path[row, : len(path)].tolist() == path
                assert state.length[row] == min(length[row] + len(path), CAPACITY)
                farthest = max(farthest, path[-1])
        for row, text in enumerate(toys.texts(state)):
            assert text == whole[row, : len(text)].tolist()
            wanted = toys.committed(plain.replace(length=state.cache.length), row)
            for actual, want in zip(toys.committed(state.cache, row), wanted, strict=True):
                np.testing.assert_allclose(actual, want, rtol=0, atol=2e-5 * np.abs(want).max())

    check()
    assert farthest >= 48
