"""A sink is a score of each head that joins the softmax, with a value of 0: every form of
attention beside NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention

ROWS, WIDTH, HEADS, KEY_HEADS, SLOTS, DIM = 2, 6, 4, 2, 23, 8
SINKS = np.array([-3.0, 0.5, 2.0, 40.0], np.float32)
"""The last one leaves next to nothing of its head."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def drawn(width: int, slots: int) -> tuple[np.ndarray, ...]:
    """Queries, keys, values, and what tokens see behind different lengths."""
    query = normal(ROWS, width, HEADS, DIM)
    keys, values = (normal(ROWS, KEY_HEADS, slots, DIM, seed=seed) for seed in (1, 2))
    position = np.array([[0], [slots - width]]) + np.arange(width)
    return query, keys, values, np.arange(slots) <= position[:, :, None]


def naive(query, keys, values, seen, softcap: float | None = None) -> np.ndarray:
    """One head of one token at a time, in float64."""
    rows, width, heads, dim = query.shape
    out = np.zeros((rows, width, heads, dim))
    for b, n, h in np.ndindex(rows, width, heads):
        of = h // (heads // keys.shape[1])
        scores = keys[b, of].astype(np.float64) @ query[b, n, h] * dim**-0.5
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        weights = np.where(seen[b, n], np.exp(scores), 0.0)
        out[b, n, h] = weights @ values[b, of] / (weights.sum() + np.exp(float(SINKS[h])))
    return out.reshape(rows, width, heads * dim)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("form", [attention.attend, attention.cpu_attend])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_sink_joins_the_softmax(monkeypatch, form, softcap, blocks):
    """At once and in blocks; in the first row whole blocks are unseen."""
    inputs = drawn(WIDTH, SLOTS)
    if blocks:
        monkeypatch.setattr(attention, "_WIDE", WIDTH)
        monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    mix = jax.jit(functools.partial(form, softcap=softcap, sinks=SINKS))
    np.testing.assert_allclose(mix(*inputs), naive(*inputs, softcap), rtol=0, atol=2e-6)


def test_a_narrow_pass_over_a_long_cache_has_them_too():
    inputs = drawn(1, attention._NARROW["cpu"][0])
    mix = jax.jit(functools.partial(attention.cpu_attend, sinks=SINKS))
    np.testing.assert_allclose(mix(*inputs), naive(*inputs), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_causal_attention_has_them_too(window):
    """Over more than one block of queries."""
    length = attention._CAUSAL_BLOCK + 9
    query, keys, values, _ = drawn(length, length)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    mix = functools.partial(attention.causal_attend, window=window, sinks=jnp.asarray(SINKS))
    wanted = naive(query, keys, values, np.broadcast_to(seen, (ROWS, length, length)))
    np.testing.assert_allclose(jax.jit(mix)(query, keys, values), wanted, rtol=0, atol=2e-6)


def test_a_gradient_through_blocks_is_that_of_the_whole(monkeypatch):
    """Also that of the sinks."""
    query, keys, values, seen = drawn(WIDTH, SLOTS)

    def gradients(form):
        def loss(query, keys, values, sinks):
            return (form(query, keys, values, seen, sinks=sinks) ** 2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, keys, values, SINKS)

    whole = gradients(attention.attend)
    assert np.abs(whole[3]).max() > 0.01
    monkeypatch.setattr(attention, "_WIDE", WIDTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 4)
    for form in (attention.attend, attention.cpu_attend):
        for ours, theirs in zip(gradients(form), whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
