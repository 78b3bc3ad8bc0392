"""Unit-triangular systems of the delta rule: solved as NumPy solves them, by products alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.mixers.outer_products import BLOCK, read
from specjax.models.mixers.unit_triangular import solve


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 9, 16, 17, 40, BLOCK])
@pytest.mark.parametrize("entry", ["random", "all 1", "all 2"])
def test_a_solution_is_that_of_numpy(size: int, entry: str) -> None:
    draw = np.random.default_rng(size)
    lower = np.tril(draw.uniform(-1, 1, (2, 3, size, size)), -1)
    if entry != "random":  # equal keys: the largest entries that a delta rule has
        lower = np.tril(np.full_like(lower, float(entry[-1])), -1)
    else:
        lower /= max(1.0, size / 8)  # random signs of a large system are badly conditioned
    right = draw.normal(size=(2, 3, size, 5))
    expected = np.linalg.solve(np.eye(size) + lower, right)
    made = solve(jnp.asarray(lower, jnp.float32), jnp.asarray(right, jnp.float32))
    np.testing.assert_allclose(made, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("width", [8, BLOCK])
def test_a_pass_calls_no_library_for_triangles(width: int) -> None:
    state, key = jnp.zeros((1, 2, 8, 8)), jnp.zeros((1, width, 2, 8))
    gate = jnp.zeros((1, width, 2))
    text = jax.jit(read).lower(state, key, key, key, gate, gate).as_text()
    assert "dot_general" in text
    assert "triangular" not in text and "custom_call" not in text
