"""Kimi delta attention: a gated delta net in which each channel of a key has a gate of its own.

The gates, and the factors of the output, are products of two narrow matrices.

Reference: Kimi Team 2025, arXiv 2510.26692, section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import whole
from specjax.caches import LayerState
from specjax.models.config import Mixer, TransformerConfig
from specjax.models.layers import Dense, aside, named_param, residual_scale
from specjax.models.mixers.attention import Rotations
from specjax.models.mixers.convolution import convolve_each
from specjax.models.mixers.gated_delta import unit
from specjax.models.mixers.outer_products import stage_read


@dataclasses.dataclass(frozen=True)
class KimiDelta(Mixer):
    """The sizes of Kimi delta attention."""

    heads: int
    head_dim: int  # of queries, keys and values, and of the narrow matrices
    conv_size: int = 4  # tokens that the convolutions of queries, keys and values read

    def module(self) -> type[KimiDeltaNet]:
        return KimiDeltaNet

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name in ("heads", "head_dim"):
            whole(name, getattr(self, name), 1, 2**14, "a whole number in [1, 16384]")
        whole("conv_size", self.conv_size, 2, 64, "a whole number in [2, 64]")

    def units(self) -> int:
        return self.heads

    def state(self, batch: int, dtype: DTypeLike) -> LayerState:
        columns = jnp.zeros((batch, self.conv_size - 1, self.heads * self.head_dim), dtype)
        shape = (batch, self.heads, self.head_dim, self.head_dim)
        return LayerState((columns,) * 3, jnp.zeros(shape, jnp.float32))


class KimiDeltaNet(nn.Module):
    """A layer's Kimi delta attention; its state and gates are float32 whatever the weights are."""

    config: TransformerConfig
    mixer: KimiDelta
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: LayerState | None, visible: Array | None
    ) -> tuple[Array, LayerState]:
        """Computes a mixer's output and its memory; as `mixers.gated_delta.GatedDeltaNet`."""
        del rotations
        c, m = self.config, self.mixer
        memory = m.state(len(x), x.dtype) if memory is None else memory
        every = m.heads * m.head_dim
        heads = (*x.shape[:2], m.heads, m.head_dim)

        def project(name: str, features: int, axis: str = "states", x: Array = x) -> Array:
            return self.dense(features, ("embed", axis), False, c.init_scale, name=name)(x)

        def narrowed(name: str) -> Array:
            narrow, axes = project(f"{name}_a", m.head_dim, "narrow"), ("narrow", "states")
            wide = self.dense(every, axes, False, c.init_scale, name=f"{name}_b")(narrow)
            return wide.astype(jnp.float32)

        def small(name: str, start: float, size: int, axis: str = "states") -> Array:
            filled = nn.initializers.constant(start)
            return named_param(self, name, filled, (axis,), (size,)).astype(jnp.float32)

        inputs = {name: project(name, every) for name in "qkv"}
        mixed = convolve_each(self, inputs, memory.columns, m.conv_size, c.init_scale, visible)
        query, key, value = (mixed[name].reshape(heads).astype(jnp.float32) for name in "qkv")
        query, key = unit(query), unit(key)
        beta = jax.nn.sigmoid(project("b", m.heads, x=aside(x)).astype(jnp.float32))
        rate = jnp.exp(small("A_log", 0.0, m.heads))[:, None]
        step = (narrowed("f") + small("dt_bias", 1.0, every)).reshape(heads)
        gate = -rate * jax.nn.softplus(step)
        scale = m.head_dim**-0.5
        out, staged = stage_read(
            memory,
            tuple(inputs.values()),
            query * scale,
            key,
            value,
            gate,
            beta,
            visible,
            c.exact_states,
        )
        out = out * jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + c.norm_eps)
        out = small("norm", 1.0, m.head_dim, "value_dim") * out
        out = out * jax.nn.sigmoid(narrowed("g").reshape(heads))
        out = out.astype(x.dtype).reshape(*x.shape[:2], every)
        down = self.dense(c.hidden_size, ("states", "embed"), False, residual_scale(c), name="o")
        return down(out), staged
