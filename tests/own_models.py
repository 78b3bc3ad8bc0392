"""Small models as users write them, in Flax Linen, Flax NNX, Equinox and plain JAX, with or without
a cache.

All have 29 tokens and 48 positions. `MODELS` holds each as `(model, params)`.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array
from toys import TRANSFORMERS as toys

from specjax import KVCache, RecurrentCache
from specjax.caches.kv import stage, visible_slots
from specjax.models import from_function, from_linen, from_nnx
from specjax.models.attention import attend

SIZES: Any = {"vocab_size": toys.VOCAB, "max_positions": toys.CAPACITY}
WIDTH = 16
SHARP = 6.0  # scales the logits: at temperature 1 the distributions are neither uniform nor certain


class Linen(nn.Module):
    """Flax's own attention over the whole text."""

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        places = nn.Embed(toys.CAPACITY, WIDTH)(jnp.arange(tokens.shape[1]))
        x = nn.Embed(toys.VOCAB, WIDTH)(tokens) + places
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(x, mask=nn.make_causal_mask(tokens))
        return SHARP * nn.Dense(toys.VOCAB)(x)


class Nnx(nnx.Module):
    """The same in NNX; it also returns hidden states."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(toys.VOCAB, WIDTH, rngs=rngs)
        self.places = nnx.Embed(toys.CAPACITY, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.head = nnx.Linear(WIDTH, toys.VOCAB, rngs=rngs)

    def __call__(self, tokens: Array) -> tuple[Array, Array]:
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return SHARP * self.head(x), x


class Equinox(eqx.Module):
    """The same in Equinox, whose models are written for a single text."""

    embed: eqx.nn.Embedding
    places: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, key: Array):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(toys.VOCAB, WIDTH, key=keys[0])
        self.places = eqx.nn.Embedding(toys.CAPACITY, WIDTH, key=keys[1])
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[2])
        self.head = eqx.nn.Linear(WIDTH, toys.VOCAB, key=keys[3])

    def __call__(self, tokens: Array) -> Array:
        position = jnp.arange(len(tokens))
        x = jax.vmap(self.embed)(tokens) + jax.vmap(self.places)(position)
        x = x + self.attention(x, x, x, mask=position[:, None] >= position)
        return SHARP * jax.vmap(self.head)(x)


def plain(params: Any, tokens: Array) -> Array:
    """Attention with one head over the whole text."""
    position = jnp.arange(tokens.shape[1])
    x = params["embed"][tokens] + params["places"][position]
    query, key, value = (y[:, :, None] for y in jnp.split(x @ params["qkv"], 3, axis=-1))
    x = x + jax.nn.dot_product_attention(query, key, value, is_causal=True)[:, :, 0]
    return x @ params["head"]


def cached(
    params: Any, tokens: Array, positions: Array, cache: KVCache, mask: Array | None
) -> tuple[Array, KVCache]:
    """The same with a cache: keys and values are staged, and attention sees the visible slots."""
    x = params["embed"][tokens] + jnp.take(
        params["places"], positions, axis=0
    )  # NaN for positions beyond the end
    query, key, value = (
        y[:, :, None] for y in jnp.split(x @ params["qkv"], 3, axis=-1)
    )  # [B, N, 1, E]
    keys = stage(cache.keys[0], key.swapaxes(1, 2), cache.length)
    values = stage(cache.values[0], value.swapaxes(1, 2), cache.length)
    visible = visible_slots(cache.length, tokens.shape[1], cache.capacity, mask)
    x = x + attend(query, keys, values, visible)
    return x @ params["head"], KVCache((keys,), (values,), cache.length)


def plain_params(seed: int = 0) -> dict[str, Array]:
    shapes = {
        "embed": (toys.VOCAB, WIDTH),
        "places": (toys.CAPACITY, WIDTH),
        "qkv": (WIDTH, 3 * WIDTH),
        "head": (WIDTH, toys.VOCAB),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: 0.5 * jax.random.normal(key, shapes[name])
        for name, key in zip(shapes, keys, strict=True)
    }


def empty_kv(rows: int, slots: int) -> KVCache:
    return KVCache.zeros(1, rows, 1, slots, WIDTH, jnp.float32)


class Gru(nn.Module):
    """A recurrent Linen module whose states are its outputs."""

    @nn.compact
    def __call__(self, tokens: Array, positions: Array, cache: RecurrentCache, mask: None):
        lifted: Any = nn.scan(
            nn.GRUCell,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        _, states = lifted(WIDTH)(cache.state, nn.Embed(toys.VOCAB, WIDTH)(tokens))
        return 2 * SHARP * nn.Dense(toys.VOCAB)(states), cache.stage(states)


def empty_gru(rows: int, slots: int) -> RecurrentCache:
    return RecurrentCache.create(jnp.zeros((rows, WIDTH)))


def lstm(params: Any, tokens: Array, positions: Array, cache: RecurrentCache, mask: None):
    """A recurrent function whose state is a pair; it also returns hidden states."""

    def step(state, x):
        hidden, cell = state
        write, keep, show, new = jnp.split(
            jnp.concatenate([x, hidden], axis=-1) @ params["cell"], 4, axis=-1
        )
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(show) * jnp.tanh(cell)
        return (hidden, cell), hidden

    hidden, cache = cache.scan(step, params["embed"][tokens])
    return hidden @ params["head"], hidden, cache


def lstm_params() -> dict[str, Array]:
    embed, cell, head = jax.random.split(jax.random.key(0), 3)
    return {
        "embed": jax.random.normal(embed, (toys.VOCAB, WIDTH)),
        "cell": 0.5 * jax.random.normal(cell, (2 * WIDTH, 4 * WIDTH)),
        "head": 2 * jax.random.normal(head, (WIDTH, toys.VOCAB)),
    }


def empty_lstm(rows: int, slots: int) -> RecurrentCache:
    return RecurrentCache.create((jnp.zeros((rows, WIDTH)), jnp.zeros((rows, WIDTH))))


def _equinox():
    params, static = eqx.partition(Equinox(jax.random.key(0)), eqx.is_array)
    return from_function(
        lambda params, tokens: jax.vmap(eqx.combine(params, static))(tokens), **SIZES
    ), params


def _linen():
    return from_linen(Linen(), **SIZES), Linen().init(
        jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )


def _gru():
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Gru().init(jax.random.key(0), tokens, tokens, empty_gru(1, 2), None)
    return from_linen(Gru(), **SIZES, init_cache=empty_gru), params


_MAKERS = {
    "linen": _linen,
    "nnx": lambda: from_nnx(Nnx(nnx.Rngs(0)), **SIZES),
    "equinox": _equinox,
    "function": lambda: (from_function(plain, **SIZES), plain_params()),
    "cached function": lambda: (
        from_function(cached, **SIZES, init_cache=empty_kv),
        plain_params(),
    ),
    "recurrent linen": _gru,
    "recurrent function": lambda: (
        from_function(lstm, **SIZES, init_cache=empty_lstm),
        lstm_params(),
    ),
}
NAMES = list(_MAKERS)


@functools.cache
def own(name: str) -> tuple[Any, Any]:
    """The model and its parameters."""
    return _MAKERS[name]()
