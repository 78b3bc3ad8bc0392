"""Layers with a state: rejected drafts leave nothing in it, and it is not kept for each draft."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_model import CAPACITY, CONFIG, DELTA, MODEL, ROWS, VOCAB, weights

from specjax.caches import LayerState, layer_state
from specjax.models import LinenModel, Transformer
from specjax.models.mixers import convolution, outer_products

TREE = [-1, 0, 0, 1, 2, 4, 2]
"""The parent of each node."""

ANCESTORS = np.zeros((7, 7), bool)
for node, parent in enumerate(TREE):
    ANCESTORS[node] = ANCESTORS[parent] if parent >= 0 else False
    ANCESTORS[node, node] = True


def one_pass(params, cache, tokens, kept, is_tree):
    """The cache after one pass, of which `kept` = (count, path) is committed."""
    depth = ANCESTORS.sum(1) - 1 if is_tree else np.arange(tokens.shape[1])
    mask = jnp.asarray(ANCESTORS)[None] if is_tree else None
    out = MODEL.apply(params, tokens, cache.length[:, None] + depth, cache, mask)
    return out.staged.commit(*kept) if is_tree else out.staged.commit(kept[0])


passed = jax.jit(one_pass, static_argnums=4)


def check(is_tree, passed=passed):
    """Raises AssertionError unless a few passes, each with accepted and rejected nodes, leave the
    cache that reading the accepted tokens leaves."""
    rng = np.random.default_rng(5)
    cache = MODEL.init_cache(ROWS, CAPACITY)
    texts = [[] for _ in range(ROWS)]
    for _ in range(4):
        tokens = rng.integers(0, VOCAB, (ROWS, len(TREE)))
        paths = np.zeros((ROWS, 4), int)
        counts = np.zeros(ROWS, int)
        for row in range(ROWS):
            end = rng.integers(0, len(TREE) if is_tree else 4)
            path = np.flatnonzero(ANCESTORS[end]) if is_tree else np.arange(end)
            counts[row], paths[row, : len(path)] = len(path), path
            texts[row] += list(tokens[row, path])
        kept = jnp.asarray(counts), jnp.asarray(paths)
        cache = passed(weights(), cache, jnp.asarray(tokens), kept, is_tree)
    for row in range(ROWS):
        text = jnp.asarray(texts[row])[None]
        one = MODEL.init_cache(1, CAPACITY)
        plain = passed(weights(), one, text, (jnp.array([text.shape[1]]), None), False)
        for mine, wanted in zip(cache.states, plain.states, strict=True):
            np.testing.assert_allclose(mine.state[row], wanted.state[0], atol=1e-5)
            for own, other in zip(mine.columns, wanted.columns, strict=True):
                np.testing.assert_allclose(own[row], other[0], atol=1e-5)
        for own, other in zip(cache.attention.keys, plain.attention.keys, strict=True):
            size = text.shape[1]
            np.testing.assert_allclose(own[row, :, :size], other[0, :, :size], atol=1e-5)


@pytest.mark.parametrize("is_tree", [False, True])
def test_a_state_is_that_of_plain_reading(is_tree):
    check(is_tree)


def left_in_the_state(commit, self, count, path=None):
    """A commit of all drafts of the pass, accepted or not."""
    return commit(self, jnp.full_like(count, self.staged.inputs[0].shape[1]))


def pending_twice(commit, self, count, path=None):
    """A commit that adds the pending token as a draft too."""
    path = jnp.broadcast_to(jnp.arange(7), (len(count), 7)) if path is None else path
    twice = jnp.concatenate([path[:, :1], path], axis=1)
    return commit(self, count + 1, twice)


def of_siblings(read, state, query, key, value, gate, beta=None, ancestors=None):
    """Sums of gates over all nodes before a node, its siblings too."""
    made = read(state, query, key, value, gate, beta, ancestors)
    return made[0], made[1], jnp.cumsum(gate, axis=1)


FAULTS = {
    "a rejected draft is left in the state": (LayerState, "commit", left_in_the_state),
    "the pending token is read twice": (LayerState, "commit", pending_twice),
    "gates are summed over siblings": (outer_products, "read", of_siblings),
    "a sibling's column is in the convolution": (
        convolution, "convolve", lambda convolve, *given: convolve(*given[:-1]),
    ),
    "a node reads the updates of its siblings": (
        outer_products, "_solved",
        lambda solved, *given: solved(*given[:-1], None),
    ),
    "the state before the path does not decay": (
        layer_state, "advanced",
        lambda advanced, state, *staged: advanced(state, *staged) + state - advanced(
            state, jnp.zeros_like(staged[0]), *staged[1:]
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch):
    where, name, wrong = FAULTS[fault]
    right = getattr(where, name)

    def planted(*given, **named):
        return wrong(right, *given, **named)

    monkeypatch.setattr(where, name, planted)
    # A function of its own, since programs are kept by their function.
    afresh = jax.jit(lambda *given: one_pass(*given), static_argnums=4)
    with pytest.raises(AssertionError):
        check(True, afresh)


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_as_large_as_a_state_for_each_node(exact):
    """Of what a pass over a tree and its commit compute, and of what it stages."""
    mixer = dataclasses.replace(DELTA, key_dim=32, value_dim=32)
    config = dataclasses.replace(CONFIG, mixers=(mixer, None, mixer), exact_states=exact)
    model = LinenModel(Transformer(config))
    params = jax.eval_shape(model.init, jax.random.key(0))
    cache = jax.eval_shape(lambda: model.init_cache(1, CAPACITY))
    nodes, every = len(TREE), mixer.value_heads * mixer.key_dim * mixer.value_dim

    def step(params, cache, tokens):
        out = model.apply(params, tokens, tokens, cache, jnp.asarray(ANCESTORS)[None])
        return out.staged, out.staged.commit(jnp.array([2]), jnp.array([[0, 2]]))

    tokens = jax.ShapeDtypeStruct((1, nodes), jnp.int32)
    made = jax.make_jaxpr(step)(params, cache, tokens)
    assert max(all_sizes(made.jaxpr)) < nodes * every
    staged = jax.eval_shape(step, params, cache, tokens)[0].states[0].staged
    numbers = mixer.key_heads * mixer.key_dim + mixer.value_heads * (mixer.value_dim + 1)
    kept = staged.keys, staged.updates, staged.gates if exact else staged.totals
    assert sum(x.size for x in kept) == nodes * numbers


def all_sizes(jaxpr):
    """The size of each array that a program computes."""
    for equation in jaxpr.eqns:
        yield from (out.aval.size for out in equation.outvars)
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from all_sizes(getattr(inner, "jaxpr", inner))
