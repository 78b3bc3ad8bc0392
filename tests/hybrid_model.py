"""A small target with gated delta nets around a layer of attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import LinenModel, Transformer, TransformerConfig
from specjax.models.mixers.gated_delta import GatedDelta

VOCAB, ROWS, CAPACITY = 23, 3, 60
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=6, value_dim=5, conv_size=4)
CONFIG = TransformerConfig(
    vocab_size=VOCAB, hidden_size=12, mlp_size=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=6, max_positions=CAPACITY, output_gate=True, qk_norm="head", init_scale=0.4,
    mixers=(DELTA, None, DELTA),
)  # fmt: skip
MODEL = LinenModel(Transformer(CONFIG))


@functools.cache
def weights():
    """Random parameters; gates and small vectors too, so that none is neutral."""
    params, rng = jax.jit(MODEL.init)(jax.random.key(0)), np.random.default_rng(1)

    def drawn(x):
        noise = 0.3 * rng.standard_normal(x.shape, np.float32) if x.ndim == 1 else 0
        return jnp.asarray(x + noise)

    return jax.tree.map(drawn, params)
