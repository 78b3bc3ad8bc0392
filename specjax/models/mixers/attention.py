"""Attention, the mixer of most layers."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import linen as nn
from jax import Array

from specjax._internal.platforms import on_cpu
from specjax.caches import Memory
from specjax.models.attention import attend, causal_attend
from specjax.models.config import TransformerConfig
from specjax.models.layers import Dense, Norm, named_param, residual_scale, scaled
from specjax.models.rope import rotate

Rotations = tuple[Array, ...] | None


class Attention(nn.Module):
    """Grouped-query attention, which stages its keys and values if there is a cache."""

    config: TransformerConfig
    window: int | None
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend
    key_scale: float = 1.0

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: Memory | None, visible: Array | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the output [B, N, E], and the layer's keys and values with the new ones staged.

        Args:
          x: [B, N, E].
          rotations: of the positions.
          memory: the layer's cache; None: there is none.
          visible: [B or 1, N, S] bool, the slots (without a cache: tokens) that each token attends
            to; None: causal.
        """
        c = self.config
        batch, width, _ = x.shape

        def turned(y: Array) -> Array:
            return y if rotations is None else rotate(y, rotations, c.interleaved)

        def project(name: str, heads: int, normed: bool = False) -> Array:
            axis = "heads" if name == "q" else "kv_heads"
            y = self.dense(
                heads * c.head_dim, ("embed", axis), c.qkv_bias, c.init_scale, name=name
            )(x)
            # Otherwise a TPU turns the kernel, so that its product lies as the heads are read.
            y = on_cpu(lambda y: y, jax.lax.optimization_barrier, y)
            if normed and c.qk_norm == "whole":
                y = Norm(c, "rms", axis, name=f"{name}_norm")(y)
            y = y.reshape(batch, width, heads, c.head_dim)
            if not normed:
                return y
            y = turned(y) if c.qk_norm_last else y
            if c.qk_norm == "head":
                y = Norm(c, "rms", "head_dim", name=f"{name}_norm")(y)
            if c.qk_norm == "heads":
                y = Norm(c, "centred", (axis, "head_dim"), name=f"{name}_norm")(y)
            return y if c.qk_norm_last else turned(y)

        query = project("q", c.num_heads, normed=True)
        if rotations is not None and len(rotations) == 3:  # the rope has `growth`
            query = query * rotations[2].astype(query.dtype)
        keys = scaled(project("k", c.num_kv_heads, normed=True), self.key_scale).swapaxes(1, 2)
        values = project("v", c.num_kv_heads).swapaxes(1, 2)
        if memory is not None:
            keys, values = memory.stage(keys, values)
        scaling, sinks = (c.query_scale, c.attention_softcap), None
        if c.sinks:
            init = nn.initializers.normal(c.init_scale)
            sinks = named_param(self, "sinks", init, ("heads",), (c.num_heads,))
        if visible is None:
            mixed = causal_attend(query, keys, values, *scaling, self.window, sinks)
        else:
            mixed = self.attend(query, keys, values, visible, *scaling, sinks)
        if c.output_gate:
            wide = c.num_heads * c.head_dim
            gate = self.dense(wide, ("embed", "heads"), c.qkv_bias, c.init_scale, name="gate")(x)
            mixed = mixed * nn.sigmoid(gate)
        out = self.dense(c.hidden_size, ("heads", "embed"), c.out_bias, residual_scale(c), name="o")
        return out(mixed), (keys, values)
