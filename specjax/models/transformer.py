"""The one decoder-only transformer.  A family is a configuration of it and a table of tensor names.

Pre-norm residual blocks of grouped-query attention with rotary positions and a gated MLP.  Layers are unrolled, each
with its own cache leaf: a scan over stacked layers would slice every weight and cache leaf in each turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.cache import KVCache, stage, visible_slots
from specjax.models.attention import attend, causal_attend
from specjax.models.rope import Rope, rotate
from specjax.types import ModelOutput


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and switches.  Hashable, so that it can be a static argument of `jax.jit`."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope = dataclasses.field(default_factory=Rope)
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    init_scale: float = 0.02

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "grouped-query attention shares each key head among the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn features in pairs")


class Dense(nn.Module):
    """y = x W (+ b), with W stored [in, out]: in float32 XLA:CPU verifies several rows faster that way."""

    features: int
    axes: tuple[str, str]
    use_bias: bool = False
    scale: float = 0.02
    dot_general: Callable[..., Array] = jax.lax.dot_general

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.with_logical_partitioning(nn.initializers.normal(self.scale), self.axes)
        kernel: Any = self.param("kernel", init, (x.shape[-1], self.features))
        y = self.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
        if self.use_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros_init(), self.axes[1:])
            bias: Any = self.param("bias", init, (self.features,))
            y = y + bias
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * w, computed in float32 (Zhang and Sennrich 2019, arXiv 1910.07467, equation 4)."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",))
        weight: Any = self.param("weight", init, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return weight * y.astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; stages its keys and values when there is a cache."""

    config: TransformerConfig
    dot_general: Callable[..., Array]

    @nn.compact
    def __call__(
        self, x: Array, rotations: tuple[Array, Array], memory: tuple[Array, Array, Array] | None, visible: Array | None
    ):
        c = self.config
        batch, width, _ = x.shape

        def project(name, heads):
            axes = ("embed", "heads" if name == "q" else "kv_heads")
            dense = Dense(heads * c.head_dim, axes, c.attention_bias, c.init_scale, self.dot_general, name=name)
            return dense(x).reshape(batch, width, heads, c.head_dim)

        query = rotate(project("q", c.num_heads), rotations)
        keys = rotate(project("k", c.num_kv_heads), rotations).swapaxes(1, 2)
        values = project("v", c.num_kv_heads).swapaxes(1, 2)
        if memory is not None:
            old_keys, old_values, length = memory
            keys, values = stage(old_keys, keys, length), stage(old_values, values, length)
        mixed = causal_attend(query, keys, values) if visible is None else attend(query, keys, values, visible)
        scale = c.init_scale / (2 * c.num_layers) ** 0.5  # GPT-2's: the residual stream keeps its size with depth
        out = Dense(c.hidden_size, ("heads", "embed"), c.attention_bias, scale, self.dot_general, name="o")(mixed)
        return out, keys, values


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, equation 6)."""

    config: TransformerConfig
    dot_general: Callable[..., Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config

        def dense(name, features, axes, scale):
            return Dense(features, axes, c.mlp_bias, scale, self.dot_general, name=name)

        gate = dense("gate", c.mlp_size, ("embed", "mlp"), c.init_scale)(x)
        up = dense("up", c.mlp_size, ("embed", "mlp"), c.init_scale)(x)
        scale = c.init_scale / (2 * c.num_layers) ** 0.5
        return dense("down", c.hidden_size, ("mlp", "embed"), scale)(nn.silu(gate) * up)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: TransformerConfig
    dot_general: Callable[..., Array]

    @nn.compact
    def __call__(
        self, x: Array, rotations: tuple[Array, Array], memory: tuple[Array, Array, Array] | None, visible: Array | None
    ):
        c = self.config
        normed = RMSNorm(c.norm_eps, name="attention_norm")(x)
        mixed, keys, values = Attention(c, self.dot_general, name="attention")(normed, rotations, memory, visible)
        x = x + mixed
        x = x + MLP(c, self.dot_general, name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x))
        return x, keys, values


class Transformer(nn.Module):
    """Tokens in, logits and features out.  Satisfies `types.Model` through `models.base.LinenModel`.

    Attributes:
      config: sizes and switches.
      dot_general: stands for every matrix product with a weight, as in `flax.linen.Dense`: training passes one that
        multiplies in bfloat16.
      separate_head: hold a tied embedding a second time as output matrix [E, V], which XLA:CPU multiplies several
        float32 rows by 2.6 times faster than by [V, E].
    """

    config: TransformerConfig
    dot_general: Callable[..., Array] = jax.lax.dot_general
    separate_head: bool = False

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def init_cache(self, batch: int, size: int, dtype: Any) -> KVCache:
        c = self.config
        return KVCache.zeros(c.num_layers, batch, c.num_kv_heads, size, c.head_dim, dtype)

    @nn.compact
    def __call__(
        self, tokens: Array, positions: Array, cache: KVCache | None = None, mask: Array | None = None
    ) -> ModelOutput:
        """Shapes as in `types.Model.apply`."""
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(c.init_scale), ("vocab", "embed"))
        embedding: Any = self.param("embedding", init, (c.vocab_size, c.hidden_size))
        x = jnp.take(embedding, tokens, axis=0)
        rotations = c.rope.rotations(positions, c.head_dim)
        visible = mask
        if cache is not None:
            visible = visible_slots(cache.length, tokens.shape[1], cache.capacity, mask)
        keys, values = [], []
        for i in range(c.num_layers):
            memory = None if cache is None else (cache.keys[i], cache.values[i], cache.length)
            x, k, v = Layer(c, self.dot_general, name=f"layer_{i}")(x, rotations, memory, visible)
            keys.append(k)
            values.append(v)
        hidden = RMSNorm(c.norm_eps, name="norm")(x)
        if c.tied_embeddings and not self.separate_head:
            logits = self.dot_general(hidden, embedding, (((hidden.ndim - 1,), (1,)), ((), ())))
        else:
            dense = Dense(c.vocab_size, ("embed", "vocab"), False, c.init_scale, self.dot_general, name="head")
            logits = dense(hidden)
        if cache is not None:
            cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        return ModelOutput(logits, hidden, cache)


def head_matrix(params: Any) -> Array:
    """The output matrix [E, V]: features times it are logits."""
    return params["head"]["kernel"] if "head" in params else params["embedding"].T
