"""The gated delta net: linear attention whose state forgets, and corrects what it knows of a key.

Reference: Yang et al. 2024, arXiv 2412.06464, section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import flag, real, settle, whole
from specjax.caches import LayerState
from specjax.models.config import Mixer, TransformerConfig
from specjax.models.layers import Dense, apart, aside, named_param, residual_scale
from specjax.models.mixers.attention import Rotations
from specjax.models.mixers.convolution import convolve_each
from specjax.models.mixers.outer_products import stage_read

_SMALL = 1e-6  # is added to the squared norm of queries and keys


@dataclasses.dataclass(frozen=True)
class GatedDelta(Mixer):
    """The sizes of a gated delta net."""

    key_heads: int
    value_heads: int  # a multiple of `key_heads`
    key_dim: int
    value_dim: int
    conv_size: int = 4  # tokens that the convolutions of queries, keys and values read
    norm_eps: float | None = None  # of the norm of the output; None: that of the configuration
    negative: bool = False  # beta goes up to 2, so that the state has negative eigenvalues

    def module(self) -> type[GatedDeltaNet]:
        return GatedDeltaNet

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            whole(name, getattr(self, name), 1, 2**14, "a whole number in [1, 16384]")
        whole("conv_size", self.conv_size, 2, 64, "a whole number in [2, 64]")
        flag("negative", self.negative)
        if self.norm_eps is not None:
            real("norm_eps", self.norm_eps, "[0, 3.4e38]", ", or be None")
        settle(
            (
                self.value_heads % self.key_heads,
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}",
            )
        )

    def units(self) -> int:
        return self.key_heads

    def state(self, batch: int, dtype: DTypeLike) -> LayerState:
        channels = (self.key_heads * self.key_dim,) * 2 + (self.value_heads * self.value_dim,)
        columns = tuple(jnp.zeros((batch, self.conv_size - 1, size), dtype) for size in channels)
        shape = (batch, self.value_heads, self.key_dim, self.value_dim)
        return LayerState(columns, jnp.zeros(shape, jnp.float32))


class GatedDeltaNet(nn.Module):
    """A layer's gated delta net; its state and its gates are float32 whatever the weights are."""

    config: TransformerConfig
    mixer: GatedDelta
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: LayerState | None, visible: Array | None
    ) -> tuple[Array, LayerState]:
        """Computes a mixer's output and its memory; as `models.mixers.attention.Attention`.

        `visible` [B or 1, N, N] bool has the ancestors of each token among the N, itself included;
        None: all tokens before it.
        """
        del rotations
        c, m = self.config, self.mixer
        memory = m.state(len(x), x.dtype) if memory is None else memory
        keys, values = m.key_heads * m.key_dim, m.value_heads * m.value_dim

        def project(name: str, features: int, x: Array = x) -> Array:
            return self.dense(features, ("embed", "states"), False, c.init_scale, name=name)(x)

        def small(name: str, init: float, size: int, axis: str = "states") -> Array:
            filled = nn.initializers.constant(init)
            return named_param(self, name, filled, (axis,), (size,)).astype(jnp.float32)

        inputs = {
            name: project(name, size) for name, size in (("q", keys), ("k", keys), ("v", values))
        }
        mixed = convolve_each(self, inputs, memory.columns, m.conv_size, c.init_scale, visible)
        query, key = (
            unit(mixed[name].reshape(*x.shape[:2], m.key_heads, m.key_dim).astype(jnp.float32))
            for name in "qk"
        )
        value = mixed["v"].reshape(*x.shape[:2], m.value_heads, m.value_dim)
        gated = aside(x)
        beta = jax.nn.sigmoid(project("b", m.value_heads, gated).astype(jnp.float32))
        beta = 2.0 * beta if m.negative else beta
        rate = jnp.exp(small("A_log", 0.0, m.value_heads))
        step = project("a", m.value_heads, gated).astype(jnp.float32)
        step = step + small("dt_bias", 1.0, m.value_heads)
        gate = -rate * jax.nn.softplus(step)
        out, staged = stage_read(
            memory,
            tuple(inputs.values()),
            query * m.key_dim**-0.5,
            key,
            value,
            gate,
            beta,
            visible,
            c.exact_states,
        )
        z = apart(project("z", values)).reshape(out.shape).astype(jnp.float32)
        eps = c.norm_eps if m.norm_eps is None else m.norm_eps
        out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + eps)
        weight = small("norm", 1.0, m.value_dim, "value_dim")
        out = (weight * out * nn.silu(z)).astype(x.dtype).reshape(*x.shape[:2], values)
        down = self.dense(c.hidden_size, ("states", "embed"), False, residual_scale(c), name="o")
        return down(out), staged


def unit(x: Array) -> Array:
    """Divides the last axis by its norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _SMALL)
