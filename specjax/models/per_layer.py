"""What a layer adds at its end for each token, from a table of its own.

    a = (sqrt(D) E[token] + norm(P e / sqrt(H))) / sqrt(2)      e: the embedding, of H numbers
    x + norm(W_out (act(W_gate x) * a))                         a: D numbers

Every layer has its own table E [V, D], of which a token reads one row: many parameters, of which
few are read.  The norm of the first line is the same in all layers.

Reference: Gemma 4, and before it Gemma 3n, call these per-layer embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.config import TransformerConfig
from specjax.models.layers import (
    ACTIVATIONS,
    Dense,
    Norm,
    look_up,
    named_param,
    residual_scale,
    unit_rms,
)


class Embedded(NamedTuple):
    """What all layers know of the tokens of a pass."""

    tokens: Array  # [B, N]
    vectors: Array  # [B, N, H], their embeddings as the first layer reads them
    norm: Array  # [D], the weights of the norm that the layers have in common


class PerLayerInput(nn.Module):
    """Adds what a layer knows of each token."""

    config: TransformerConfig
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(self, x: Array, embedded: Embedded) -> Array:
        """Returns [B, N, H], like `x`."""
        c = self.config
        size, hidden = c.per_layer_size, c.hidden_size

        def linear(
            name: str, y: Array, features: int, axes: tuple[str, str], scale: float
        ) -> Array:
            return self.dense(features, axes, False, scale, name=name)(y)

        init = nn.initializers.normal(c.init_scale)
        table = named_param(self, "embedding", init, ("vocab", "per_layer"), (c.vocab_size, size))
        known = look_up(table, embedded.tokens)
        known = known * jnp.asarray(size**0.5, known.dtype)
        inward = ("embed", "per_layer")
        projected = linear("project", embedded.vectors, size, inward, c.init_scale)
        projected = unit_rms(projected * jnp.asarray(hidden**-0.5, projected.dtype), c.norm_eps)
        projected = (projected * embedded.norm.astype(jnp.float32)).astype(x.dtype)
        known = (projected + known) * jnp.asarray(2**-0.5, x.dtype)
        gate = ACTIVATIONS[c.activation](linear("gate", x, size, inward, c.init_scale))
        added = linear("out", gate * known, hidden, ("per_layer", "embed"), residual_scale(c))
        return x + Norm(c, name="norm")(added)
