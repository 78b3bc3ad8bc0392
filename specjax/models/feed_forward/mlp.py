"""The MLP: the feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.config import TransformerConfig
from specjax.models.layers import ACTIVATIONS, Dense, residual_scale, scaled


class MLP(nn.Module):
    """A gated MLP down(act(gate(x)) * up(x)), or a plain one down(act(up(x))).

    Reference: Shazeer 2020, arXiv 2002.05202, equation 6.
    """

    config: TransformerConfig
    dense: Callable[..., Dense]
    size: int | None = None  # by default `config.mlp_size`

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        size = self.size or c.mlp_size

        def dense(name: str, features: int, axes: tuple[str, str], scale: float) -> Dense:
            return self.dense(features, axes, c.mlp_bias, scale, name=name)

        up = dense("up", size, ("embed", "mlp"), c.init_scale)(x)
        if c.gated:
            gate = dense("gate", size, ("embed", "mlp"), c.init_scale)(x)
            inner = gated_activation(c, scaled(gate, c.gate_scale), up)
        else:
            inner = ACTIVATIONS[c.activation](up)
        down = dense("down", c.hidden_size, ("mlp", "embed"), residual_scale(c))
        return scaled(down(inner), c.down_scale)


def gated_activation(c: TransformerConfig, gate: Array, up: Array) -> Array:
    """Returns act(gate) * up; with a limit (up + 1) * gate * sigmoid(slope * gate), both clamped.

    gpt-oss (OpenAI 2025, arXiv 2508.10925) has the second.
    """
    if c.gate_limit is None:
        return ACTIVATIONS[c.activation](gate) * up
    gate = jnp.minimum(gate, c.gate_limit)
    up = jnp.clip(up, -c.gate_limit, c.gate_limit)
    return (up + 1) * gate * jax.nn.sigmoid(c.gate_slope * gate)
