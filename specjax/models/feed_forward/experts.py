"""A mixture of expert MLPs: the feed-forward part of a sparse layer."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.config import TransformerConfig
from specjax.models.layers import ACTIVATIONS, Dense, named_param, residual_scale


class Experts(nn.Module):
    """A mixture of gated MLPs: for each token the weighted sum of its best experts.

    A softmax over all experts ranks them, and the best `experts_per_token` are used.  Tokens are
    sorted by expert and multiplied group by group, so only chosen experts are computed.

    Reference: Shazeer et al. 2017, arXiv 1701.06538, section 2.
    """

    config: TransformerConfig
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config

        def stack(name: str, shape: tuple[int, int], axes: tuple[str, str], scale: float) -> Array:
            init = nn.initializers.normal(scale)
            return named_param(self, name, init, ("expert", *axes), (c.num_experts, *shape))

        inner = c.expert_size
        gate = stack("gate", (c.hidden_size, inner), ("embed", "expert_mlp"), c.init_scale)
        up = stack("up", (c.hidden_size, inner), ("embed", "expert_mlp"), c.init_scale)
        down = stack("down", (inner, c.hidden_size), ("expert_mlp", "embed"), residual_scale(c))
        router = self.dense(c.num_experts, ("embed", "experts"), False, c.init_scale, name="router")

        flat = x.reshape(-1, c.hidden_size)
        weights, chosen = jax.lax.top_k(
            jax.nn.softmax(router(flat).astype(jnp.float32)), c.experts_per_token
        )
        if c.normalise_experts:
            weights = weights / weights.sum(-1, keepdims=True)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        token = order // c.experts_per_token
        sizes = jnp.bincount(chosen.reshape(-1), length=c.num_experts).astype(jnp.int32)
        rows = flat[token]
        hidden = ACTIVATIONS[c.activation](
            jax.lax.ragged_dot(rows, gate, sizes)
        ) * jax.lax.ragged_dot(rows, up, sizes)
        out = jax.lax.ragged_dot(hidden, down, sizes) * weights.reshape(-1)[order][:, None].astype(
            x.dtype
        )
        return jnp.zeros_like(flat).at[token].add(out).reshape(x.shape)
