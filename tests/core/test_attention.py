"""Attention over a long cache in blocks of slots equals attention over all slots at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention

ROWS, WIDTH, HEADS, KEY_HEADS, SLOTS, DIM = 2, 6, 4, 2, 23, 8
KEY = jax.random.key(7)


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


def test_a_gradient_through_blocks_is_that_of_the_whole(monkeypatch):
    """Under jit, where the number of blocks is not known."""
    seen = visible("any")
    keys = [jax.random.normal(key, (ROWS, KEY_HEADS, SLOTS, DIM)) for key in jax.random.split(KEY)]
    query = jax.random.normal(jax.random.key(2), (ROWS, WIDTH, HEADS, DIM))

    def gradients():
        def loss(query, keys, values):
            return (attention.attend(query, keys, values, seen, softcap=3.0) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, *keys)

    whole = gradients()
    monkeypatch.setattr(attention, "_WIDE", WIDTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    for ours, theirs in zip(gradients(), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_a_narrow_pass_over_a_long_cache_reads_its_filled_part(width):
    """On a CPU: the result is that of all slots, NaNs in empty blocks have no effect, and a row's
    bits do not depend on how far the others are."""
    slots = attention._NARROW["cpu"][0]
    query = jax.random.normal(jax.random.key(3), (2, width, HEADS, DIM))
    keys = [jax.random.normal(key, (2, KEY_HEADS, slots, DIM)) for key in jax.random.split(KEY)]
    position = jnp.array([[9], [700]]) + jnp.arange(width)
    seen = jnp.arange(slots) <= position[:, :, None]
    whole = attention._by_group(
        lambda *inputs: attention._whole(DIM**-0.5, None, *inputs), query, *keys, seen
    )
    empty = [x.at[:, :, 768:].set(jnp.nan) for x in keys]
    both = jax.jit(attention.attend)(query, *empty, seen)
    np.testing.assert_allclose(both, whole, rtol=0, atol=1e-5)
    ahead = seen.at[1].set(jnp.arange(slots) <= 9)
    np.testing.assert_array_equal(jax.jit(attention.attend)(query, *empty, ahead)[0], both[0])


def test_long_texts_can_be_learned():
    """Causal attention has a gradient under jit, however long the text is."""
    length = attention.BLOCK_SLOTS + 2 * attention._CAUSAL_BLOCK
    query = jax.random.normal(KEY, (1, length, HEADS, DIM))
    keys = jax.random.normal(KEY, (1, KEY_HEADS, length, DIM))
    causal = jnp.tril(jnp.ones((1, length, length), bool))

    def gradient(mix):
        return jax.jit(jax.grad(lambda query: (mix(query, keys, keys) ** 2).sum()))(query)

    explicit = gradient(lambda *inputs: attention.attend(*inputs, causal))
    np.testing.assert_allclose(gradient(attention.causal_attend), explicit, rtol=0, atol=1e-5)
