"""Attention over a long cache in blocks of slots equals attention over all slots at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention

ROWS, WIDTH, HEADS, KEY_HEADS, SLOTS, DIM = 2, 6, 4, 2, 23, 8


def visible(kind):
    """[B, N, S]: which slots each token sees."""
    slot, position = jnp.arange(SLOTS), jnp.array([[3], [9]]) + jnp.arange(WIDTH)
    distance = position[:, :, None] - slot
    if kind == "window behind many slots":
        distance = distance + 6
        return (distance >= 0) & (distance < 2)
    if kind == "any":
        return jax.random.bernoulli(jax.random.key(1), 0.2, distance.shape) | (distance == 0)
    return distance >= 0


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["causal", "window behind many slots", "any"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_are_the_whole(monkeypatch, kind, softcap, dtype):
    """The blocks do not divide the slots, and unseen slots hold infinities."""
    one, two, three = jax.random.split(jax.random.key(0), 3)
    seen = visible(kind)
    query = jax.random.normal(one, (ROWS, WIDTH, HEADS, DIM), dtype)
    keys, values = (
        jax.random.normal(key, (ROWS, KEY_HEADS, SLOTS, DIM), dtype) for key in (two, three)
    )
    keys = jnp.where(seen.any(1)[:, None, :, None], keys, jnp.inf)
    whole = attention.attend(query, keys, values, seen, None, softcap)
    monkeypatch.setattr(attention, "_WIDE", WIDTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    parts = attention.attend(query, keys, values, seen, None, softcap)
    assert parts.dtype == dtype and bool(jnp.isfinite(whole).all())
    np.testing.assert_allclose(
        np.asarray(parts, np.float32),
        np.asarray(whole, np.float32),
        rtol=0,
        atol=1e-5 if dtype == jnp.float32 else 0.05,
    )


def test_empty_slots_cost_nothing(monkeypatch):
    """Slots behind the last or before the first visible slot are not read: NaNs there have no
    effect."""
    monkeypatch.setattr(attention, "_WIDE", WIDTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    seen = jnp.zeros((1, WIDTH, SLOTS), bool).at[:, :, 9:11].set(True)
    values = jnp.full((1, KEY_HEADS, SLOTS, DIM), jnp.nan).at[:, :, 8:12].set(1.0)
    out = attention.attend(jnp.ones((1, WIDTH, HEADS, DIM)), jnp.zeros_like(values), values, seen)
    np.testing.assert_allclose(out, 1.0)
