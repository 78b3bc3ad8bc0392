"""Latent attention: its cache holds one vector a token, and every way to read a text agrees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_model import CAPACITY, CONFIG, LENGTH, ROWS, SIZES, close, model, read, tokens, weights

import specjax
from specjax.models import attention


def naive(params, sizes, x, scale):
    """One layer's mixer for a single row [N, E], by the definition and in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(y, weight):
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weight

    def rope(y):
        angle = np.arange(len(y))[:, None] * 1e4 ** (
            -np.arange(0, sizes.rope_dim, 2) / sizes.rope_dim
        )
        turned = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], -1).reshape(y.shape)

    if sizes.q_rank is None:
        query = x @ p["q"]["kernel"]
    else:
        query = norm(x @ p["q_a"]["kernel"], p["q_norm"]["weight"]) @ p["q_b"]["kernel"]
    both = x @ p["kv_a"]["kernel"]
    latent = norm(both[:, : sizes.kv_rank], p["kv_norm"]["weight"])
    shared, mixed = rope(both[:, sizes.kv_rank :]), []
    for head, q in enumerate(np.split(query, CONFIG.num_heads, axis=1)):
        keys, values = latent @ p["key_up"][head].T, latent @ p["value_up"][head].T
        scores = q[:, : sizes.nope_dim] @ keys.T + rope(q[:, sizes.nope_dim :]) @ shared.T
        scores = np.where(np.tri(len(x), dtype=bool), scores * scale, -np.inf)
        chance = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(chance / chance.sum(-1, keepdims=True) @ values)
    return np.concatenate(mixed, axis=1) @ p["o"]["kernel"]


@pytest.mark.parametrize("kind", SIZES)
def test_a_layer_is_its_definition(kind):
    """The norms' eps of 1e-6 is not that of the configuration."""
    config = dataclasses.replace(model(kind).module.config, norm_eps=0.5)
    x = np.random.default_rng(2).standard_normal((1, LENGTH, CONFIG.hidden_size), np.float32)
    layer = specjax.models.LatentAttention(config, SIZES[kind], specjax.models.Dense)
    params = weights(kind)["layer_0"]["mixer"]
    turned = config.rope.rotations(jnp.arange(LENGTH)[None], SIZES[kind].rope_dim)
    found, _ = jax.jit(layer.apply)({"params": params}, x, turned, None, None)
    close(found[0], naive(params, SIZES[kind], np.asarray(x[0], np.float64), CONFIG.query_scale))


@pytest.mark.parametrize("kind", SIZES)
def test_however_a_text_is_read(kind):
    """At once without a cache and with one, in chunks with padding rows, and token by token."""
    text = tokens()
    wanted = read(kind, text).logits
    cache = model(kind).init_cache(ROWS, CAPACITY)
    close(read(kind, text, cache).logits, wanted)
    # Row 1 reads four tokens fewer of each chunk, and its padding is overwritten.
    found, done = [[], []], np.zeros(ROWS, int)
    while (done < LENGTH).any():
        part = np.stack([np.pad(row, (0, 9))[n : n + 9] for row, n in zip(text, done, strict=True)])
        count = np.minimum(LENGTH - done, [9, 5])
        out = read(kind, part, cache)
        for row in range(ROWS):
            found[row] += list(out.logits[row, : count[row]])
        cache, done = out.staged.commit(jnp.asarray(count)), done + count
    close(np.array(found), wanted)
    cache = model(kind).init_cache(ROWS, CAPACITY)
    for i in range(LENGTH):
        out = read(kind, text[:, i : i + 1], cache)
        close(out.logits[:, 0], wanted[:, i])
        cache = out.staged.commit(jnp.ones(ROWS, jnp.int32))


def test_blocks_of_slots_are_the_whole(monkeypatch):
    """A pass of many tokens reads the slots in blocks; its gradient is that of all slots."""
    text, kind = tokens(), "low-rank queries"
    cache = model(kind).init_cache(ROWS, CAPACITY)
    at = jnp.broadcast_to(jnp.arange(LENGTH), text.shape)

    def loss(params):
        logits = model(kind).apply(params, jnp.asarray(text), at, cache).logits
        return jax.nn.log_softmax(logits)[..., 0].sum(), logits

    def both():
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights(kind))

    (_, wanted), slope = both()
    monkeypatch.setattr(attention, "_WIDE", LENGTH)
    monkeypatch.setattr(attention, "BLOCK_SLOTS", 9)
    (_, found), other = both()
    close(found, wanted)
    jax.tree.map(close, other, slope)


@pytest.mark.parametrize("kind", SIZES)
def test_a_gradient_is_that_of_absorbed_attention(kind):
    """Training computes keys and values; with a mask they are never made."""
    text, mask = tokens(), np.tri(LENGTH, dtype=bool)[None]
    at = jnp.broadcast_to(jnp.arange(LENGTH), text.shape)

    def loss(params, mask):
        logits = model(kind).apply(params, jnp.asarray(text), at, None, mask).logits
        return (jax.nn.log_softmax(logits)[..., 3] ** 2).sum()

    slopes = [jax.jit(jax.grad(loss))(weights(kind), seen) for seen in (None, mask)]
    jax.tree.map(close, *slopes)


def test_the_cache_is_small():
    """A token takes kv_rank + rope_dim numbers a layer, whatever the number of heads."""
    sizes = SIZES["low-rank queries"]
    cache = model().init_cache(ROWS, 100)
    slots = 2 * ROWS * (100 + specjax.caches.SPARE_SLOTS)
    assert sum(x.size for x in (*cache.keys, *cache.values)) == slots * (10 + 4)
    assert {x.shape[1:] for x in cache.keys} == {(1, cache.capacity, sizes.rope_dim)}
    assert {x.shape[1:] for x in cache.values} == {(1, cache.capacity, sizes.kv_rank)}


def test_bfloat16():
    """Weights and cache in bfloat16 give nearly the logits of float32."""
    half = dataclasses.replace(model(), dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights())
    text, at = tokens(), jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    out = jax.jit(half.apply)(params, jnp.asarray(text), at, half.init_cache(ROWS, CAPACITY))
    assert {x.dtype for x in (*out.staged.keys, *out.staged.values)} == {jnp.dtype("bfloat16")}
    wanted = np.asarray(read("low-rank queries", text).logits)
    assert np.abs(np.asarray(out.logits, np.float32) - wanted).max() < 0.05 * np.ptp(wanted)


@pytest.mark.parametrize("name", ["kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"])
def test_sizes_are_checked(name):
    with pytest.raises(ValueError, match=rf"{name}=0.*\[1, 1048576\]"):
        dataclasses.replace(SIZES["low-rank queries"], **{name: 0})


def test_a_rope_turns_pairs():
    with pytest.raises(ValueError, match="odd number of rotated dimensions"):
        mixers = (dataclasses.replace(SIZES["whole queries"], rope_dim=3),) * 2
        dataclasses.replace(CONFIG, mixers=mixers)
