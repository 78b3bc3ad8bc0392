"""A pass over a tree computes what the recurrence computes along each branch, node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.caches import advanced
from specjax.models.mixers.convolution import convolve
from specjax.models.mixers.outer_products import BLOCK, read

ROWS, HEADS, KEY_HEADS, DK, DV = 2, 4, 2, 8, 6


def ancestors_of(parents):
    """[N] parents, -1 at a root -> [N, N] bool, of each node, itself included."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen


def recurrence(state, query, key, value, gate, beta, parents):
    """The outputs and the states after each node of one row, by the equations at the top of
    `outer_products`, head by head."""
    states, outputs = [], []
    for node, parent in enumerate(parents):
        before = state if parent < 0 else states[parent]
        after = np.empty_like(before)
        for head in range(HEADS):
            k, v = key[node, head * KEY_HEADS // HEADS], value[node, head]
            decayed = np.exp(gate[node, head])[..., None] * before[head]
            update = v if beta is None else beta[node, head] * (v - decayed.T @ k)
            after[head] = decayed + np.outer(k, update)
        states.append(after)
        heads = [query[node, head * KEY_HEADS // HEADS] @ after[head] for head in range(HEADS)]
        outputs.append(np.stack(heads))
    return np.stack(outputs), states


@pytest.mark.parametrize("width", [1, 7, BLOCK + 9, 2 * BLOCK])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
def test_a_pass_is_the_recurrence(width, by_channel, corrects):
    """Outputs, and the states after the paths to three nodes; in trees, and in texts of several
    blocks, which are chains."""
    rng = np.random.default_rng(width)
    normal = rng.standard_normal
    state = normal((ROWS, HEADS, DK, DV))
    key = normal((ROWS, width, KEY_HEADS, DK))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    query, value = normal(key.shape), normal((ROWS, width, HEADS, DV))
    gate = -rng.exponential(0.3, (ROWS, width, HEADS, DK) if by_channel else (ROWS, width, HEADS))
    beta = rng.uniform(0, 1, (ROWS, width, HEADS)) if corrects else None
    is_tree = width < BLOCK
    parents = [
        [int(rng.integers(-1, node)) if is_tree else node - 1 for node in range(width)]
        for _ in range(ROWS)
    ]
    seen = jnp.asarray(np.stack(list(map(ancestors_of, parents)))) if is_tree else None
    given = (state, query, key, value, gate, *([] if beta is None else [beta]))
    small = [jnp.asarray(x, jnp.float32) for x in given] + ([None] if beta is None else [])
    outputs, updates, totals = jax.jit(read)(*small, seen)
    for row in range(ROWS):
        mine = [None if x is None else x[row] for x in (state, query, key, value, gate, beta)]
        wanted, states = recurrence(*mine, parents[row])
        np.testing.assert_allclose(outputs[row], wanted, atol=3e-5)
        for node in {0, width // 2, width - 1}:
            path = np.flatnonzero(ancestors_of(parents[row])[node])
            kept = (small[2][row : row + 1, path], updates[row : row + 1, path])
            count = jnp.array([len(path)])
            after = advanced(small[0][row : row + 1], *kept, totals[row : row + 1, path], count)
            np.testing.assert_allclose(after[0], states[node], atol=3e-5)


def test_equal_keys_do_not_grow():
    """The system of a text that repeats one token has powers up to 2^63, but its solution is
    bounded."""
    ones = jnp.ones((1, BLOCK, 1, 1))
    state, gate = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, BLOCK, 1))
    outputs, updates, _ = read(state, ones, ones, ones, gate, ones[..., 0])
    np.testing.assert_allclose(outputs, ones, atol=1e-6)
    np.testing.assert_allclose(updates[:, 1:], 0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_a_convolution_reads_the_nearest_ancestors(size):
    """Not the nodes before it in the order of the tree, and before the root the columns."""
    rng = np.random.default_rng(size)
    parents = [-1, 0, 0, 1, 2, 4, -1]
    x, columns = rng.standard_normal((1, 7, 3)), rng.standard_normal((1, size - 1, 3))
    kernel = rng.standard_normal((size, 3))
    seen = jnp.asarray(ancestors_of(parents))[None]
    found = convolve(*(jnp.asarray(y, jnp.float32) for y in (x, columns, kernel)), seen)
    for node in range(7):
        path = np.flatnonzero(ancestors_of(parents)[node])
        inputs = np.concatenate([columns[0], x[0, path]])[-size:]
        np.testing.assert_allclose(found[0, node], (kernel * inputs).sum(0), atol=1e-5)
