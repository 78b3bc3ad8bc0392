"""The MLP: the feed-forward part of a dense layer."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
from jax import Array

from specjax.models.config import TransformerConfig
from specjax.models.layers import ACTIVATIONS, Dense, residual_scale


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

        activate = ACTIVATIONS[c.activation]
        up = dense("up", size, ("embed", "mlp"), c.init_scale)(x)
        if c.gated:
            inner = activate(dense("gate", size, ("embed", "mlp"), c.init_scale)(x)) * up
        else:
            inner = activate(up)
        return dense("down", c.hidden_size, ("mlp", "embed"), residual_scale(c))(inner)
