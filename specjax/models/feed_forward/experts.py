"""A mixture of expert MLPs: the feed-forward part of a sparse layer."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models.config import TransformerConfig
from specjax.models.feed_forward.by_expert import Stacks, grouped
from specjax.models.feed_forward.mlp import MLP, activated
from specjax.models.layers import Dense, named_param, residual_scale
from specjax.models.router import route


class Experts(nn.Module):
    """A mixture of MLPs: for each token the weighted sum of its best experts.

    `config.router` says which experts are the best.  They may read and write fewer numbers than
    the stream has (LatentMoE: NVIDIA 2026, Nemotron 3), which one matrix makes and another
    undoes.  There may be an MLP that every token reads
    (DeepSeekMoE, arXiv 2401.06066, section 3.2), whose output may be weighted by a sigmoid.

    Reference: Shazeer et al. 2017, arXiv 1701.06538, section 2.
    """

    config: TransformerConfig
    dense: Callable[..., Dense]
    mix: Callable[..., Array] = grouped  # or another form of it, for arrays on one device

    @nn.compact
    def __call__(self, x: Array, routed: Array | None = None) -> Array:
        """Returns [B, N, H].

        Args:
          x: [B, N, H].
          routed: what the router reads, if it is not `x`.
        """
        c = self.config
        flat = x.reshape(-1, c.hidden_size)
        weights, chosen = self._route(flat if routed is None else routed.reshape(flat.shape))
        if c.expert_width:
            flat = self._linear("latent_in", c.expert_width, ("embed", "latent"))(flat)
        pairs = jnp.repeat(flat, c.experts_per_token, axis=0)
        if c.router.on_input:
            pairs = pairs * weights.reshape(-1, 1).astype(x.dtype)
            weights = jnp.ones_like(weights)
        out = self.mix(functools.partial(activated, c), pairs, chosen, self._stacks())
        out = out.reshape(*chosen.shape, -1).astype(jnp.float32)
        mixed = (out * weights[..., None]).sum(1).astype(x.dtype)
        if c.expert_width:
            mixed = self._linear("latent_out", c.hidden_size, ("latent", "embed"))(mixed)
        mixed = mixed.reshape(x.shape)
        if not c.shared_size:
            return mixed
        shared = MLP(c, self.dense, c.shared_size, name="shared")(x)
        if c.shared_gate:
            gate = self.dense(1, ("embed", "one"), False, c.init_scale, name="shared_gate")(x)
            shared = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype) * shared
        return mixed + shared

    def _linear(self, name: str, features: int, axes: tuple[str, str]) -> Dense:
        return self.dense(features, axes, self.config.mlp_bias, self.config.init_scale, name=name)

    def _route(self, x: Array) -> tuple[Array, Array]:
        """Returns the weights and the experts of each token of x [T, H]."""
        c = self.config
        r = c.router

        def vector(name: str, axis: str, size: int, start: float) -> Array:
            return named_param(self, name, nn.initializers.constant(start), (axis,), (size,))

        x = x.astype(jnp.float32)
        if r.normed_input:
            x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.norm_eps)
            scale = vector("router_scale", "embed", c.hidden_size, 1.0).astype(jnp.float32)
            x = x * scale * c.hidden_size**-0.5
        dense = self.dense(c.num_experts, ("embed", "experts"), r.bias, c.init_scale, name="router")
        return route(
            r,
            dense(x),
            c.experts_per_token,
            c.normalise_experts,
            vector("correction", "experts", c.num_experts, 0.0) if r.corrected else None,
            vector("expert_scale", "experts", c.num_experts, 1.0) if r.expert_scale else None,
        )

    def _stacks(self) -> Stacks:
        c = self.config
        zeros = nn.initializers.zeros_init()

        def stack(name: str, shape: tuple[int, int], axes: tuple[str, str], scale: float) -> Array:
            init = nn.initializers.normal(scale)
            return named_param(self, name, init, ("expert", *axes), (c.num_experts, *shape))

        def bias(name: str, axis: str, size: int) -> Array:
            return named_param(self, name, zeros, ("expert", axis), (c.num_experts, size))

        inner, wide = c.expert_size, c.expert_width or c.hidden_size

        def inward(name: str) -> Array:
            return stack(name, (wide, inner), ("embed", "expert_mlp"), c.init_scale)

        gate, up = inward("gate") if c.gated else None, inward("up")
        down = stack("down", (inner, wide), ("expert_mlp", "embed"), residual_scale(c))
        if not c.expert_bias:
            return Stacks(gate, up, down)
        biases = (
            bias("gate_bias", "expert_mlp", inner),
            bias("up_bias", "expert_mlp", inner),
            bias("down_bias", "embed", c.hidden_size),
        )
        return Stacks(gate, up, down, biases)
