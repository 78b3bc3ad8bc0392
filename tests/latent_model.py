"""Small targets with latent attention."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.models.mixers import Latent

ROWS, LENGTH, VOCAB, CAPACITY, EOS = 2, 24, 29, 48, 22
SIZES = {
    "low-rank queries": Latent(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=7, q_rank=9),
    "whole queries": Latent(kv_rank=5, nope_dim=3, rope_dim=8, value_dim=4),
}
CONFIG = specjax.TransformerConfig(
    vocab_size=VOCAB, hidden_size=32, mlp_size=48, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=4, max_positions=64, init_scale=0.35, interleaved=True, query_scale=0.6,
)  # fmt: skip


@functools.cache
def model(kind="low-rank queries"):
    sizes = (SIZES[kind],) * CONFIG.num_layers
    return specjax.LinenModel(specjax.Transformer(dataclasses.replace(CONFIG, mixers=sizes)))


@functools.cache
def weights(kind="low-rank queries"):
    """Random weights, norms too; arrays also where `read` is being traced."""
    with jax.ensure_compile_time_eval():
        params, rng = jax.jit(model(kind).init)(jax.random.key(0)), np.random.default_rng(1)
        return jax.tree.map(
            lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape, np.float32)), params
        )


def tokens(width=LENGTH):
    return np.random.default_rng(5).integers(0, VOCAB, (ROWS, width)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="kind")
def read(kind, text, cache=None, mask=None, positions=None):
    if positions is None:
        start = 0 if cache is None else cache.length[:, None]
        positions = jnp.broadcast_to(start + jnp.arange(text.shape[1]), text.shape)
    return model(kind).apply(weights(kind), text, positions, cache, mask)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
