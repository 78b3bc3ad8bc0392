"""The MLP: the feed-forward part of a dense layer."""

from __future__ import annotations

import functools
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
    in_parts: bool = False  # of the output, as `Dense` returns them; its scale is 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        size = self.size or c.mlp_size

        def dense(name: str, features: int, axes: tuple[str, str], scale: float) -> Dense:
            return self.dense(features, axes, c.mlp_bias, scale, name=name)

        up = dense("up", size, ("embed", "mlp"), c.init_scale)(x)
        gate = None
        if c.gated:
            gate = scaled(dense("gate", size, ("embed", "mlp"), c.init_scale)(x), c.gate_scale)
        inner = activated(c, gate, up)
        if self.in_parts:
            make = functools.partial(self.dense, in_parts=True)
            return make(c.hidden_size, ("mlp", "embed"), False, residual_scale(c), name="down")(
                inner
            )
        down = dense("down", c.hidden_size, ("mlp", "embed"), residual_scale(c))
        return scaled(down(inner), c.down_scale)


def activated(c: TransformerConfig, gate: Array | None, up: Array) -> Array:
    """Returns act(gate) * up, or act(up) without a gate.

    With a limit it is (up + 1) * gate * sigmoid(slope * gate), where both are clamped (gpt-oss:
    OpenAI 2025, arXiv 2508.10925).
    """
    if gate is None:
        return ACTIVATIONS[c.activation](up)
    if c.gate_limit is None:
        return ACTIVATIONS[c.activation](gate) * up
    gate = jnp.minimum(gate, c.gate_limit)
    up = jnp.clip(up, -c.gate_limit, c.gate_limit)
    return (up + 1) * gate * jax.nn.sigmoid(c.gate_slope * gate)
