"""Attention over a long cache in blocks of slots equals attention over all slots at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention

ROWS, WIDTH, HEADS, KEY_HEADS, SLOTS, DIM = 2, 6, 4, 2, 23, 8


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def visible(kind):
    """[B, N, S]: which slots each token sees."""
    slot, position = np.arange(SLOTS), np.array([[3], [9]]) + np.arange(WIDTH)
    distance = position[:, :, None] - slot
    if kind == "window behind many slots":
        distance = distance + 6
        return (distance >= 0) & (distance < 2)
    if kind == "any":
        return (np.random.default_rng(1).random(distance.shape) < 0.2) | (distance == 0)
    return distance >= 0


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["causal", "window behind many slots", "any"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_are_the_whole(monkeypatch, kind, softcap, dtype):
    """The blocks do not divide the slots, and unseen slots hold infinities."""
    seen = visible(kind)
    query = normal(ROWS, WIDTH, HEADS, DIM, dtype=dtype)
    keys, values = (normal(ROWS, KEY_HEADS, SLOTS, DIM, seed=seed, dtype=dtype) for seed in (1, 2))
    keys = np.where(seen.any(1)[:, None, :, None], keys, np.array(np.inf, dtype))

    def mix():
        attend = functools.partial(attention.attend, scale=None, softcap=softcap)
        return np.asarray(jax.jit(attend)(query, keys, values, seen))

    whole = mix()
    monkeypatch.setattr(attention, "_WIDE", WIDTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    parts = mix()
    assert parts.dtype == dtype and np.isfinite(whole.astype(np.float32)).all()
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
    seen = np.zeros((1, WIDTH, SLOTS), bool)
    values = np.full((1, KEY_HEADS, SLOTS, DIM), np.nan, np.float32)
    seen[:, :, 9:11], values[:, :, 8:12] = True, 1.0
    query = np.ones((1, WIDTH, HEADS, DIM), np.float32)
    out = jax.jit(attention.attend)(query, np.zeros_like(values), values, seen)
    np.testing.assert_allclose(out, 1.0)


def test_a_gradient_through_blocks_is_that_of_the_whole(monkeypatch):
    """Under jit, where the number of blocks is not known."""
    seen = visible("any")
    keys = [normal(ROWS, KEY_HEADS, SLOTS, DIM, seed=seed) for seed in (1, 2)]
    query = normal(ROWS, WIDTH, HEADS, DIM)

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
    query = normal(2, width, HEADS, DIM)
    keys = [normal(2, KEY_HEADS, slots, DIM, seed=seed) for seed in (1, 2)]
    position = np.array([[9], [700]]) + np.arange(width)
    seen = np.arange(slots) <= position[:, :, None]

    @jax.jit
    def in_one(*inputs):
        whole = functools.partial(attention._whole, DIM**-0.5, None)
        return attention._by_group(whole, *inputs)

    empty = [x.copy() for x in keys]
    for x in empty:
        x[:, :, 768:] = np.nan
    attend = jax.jit(attention.attend)
    both = np.asarray(attend(query, *empty, seen))
    np.testing.assert_allclose(both, in_one(query, *keys, seen), rtol=0, atol=1e-5)
    ahead = seen.copy()
    ahead[1] = np.arange(slots) <= 9
    np.testing.assert_array_equal(np.asarray(attend(query, *empty, ahead))[0], both[0])


def test_long_texts_can_be_learned():
    """Causal attention has a gradient under jit, however long the text is."""
    length = attention.BLOCK_SLOTS + 2 * attention._CAUSAL_BLOCK
    query = normal(1, length, HEADS, DIM)
    keys = normal(1, KEY_HEADS, length, DIM, seed=1)
    causal = np.tri(length, dtype=bool)[None]

    def gradient(mix):
        return jax.jit(jax.grad(lambda query: (mix(query, keys, keys) ** 2).sum()))(query)

    explicit = gradient(lambda *inputs: attention.attend(*inputs, causal))
    np.testing.assert_allclose(gradient(attention.causal_attend), explicit, rtol=0, atol=1e-5)
