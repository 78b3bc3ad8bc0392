"""The gated short convolution: y = C conv(B x), the cheapest state that a layer can have.

B, C and x are projections of the layer's input.  A layer keeps the last inputs of its convolution,
and nothing else.

Reference: Liquid AI 2025, arXiv 2511.23404, section 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import flag, whole
from specjax.caches import LayerState, Staged
from specjax.models.config import Mixer, TransformerConfig
from specjax.models.layers import Dense, named_param, residual_scale
from specjax.models.mixers.attention import Rotations
from specjax.models.mixers.convolution import convolve


@dataclasses.dataclass(frozen=True)
class ShortConv(Mixer):
    """The sizes of a gated short convolution."""

    channels: int  # the size of the residual stream
    conv_size: int = 3  # tokens that the convolution reads
    bias: bool = False  # of the projections and the convolution

    def module(self) -> type[GatedShortConv]:
        return GatedShortConv

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        whole("channels", self.channels, 1, 2**20, "a whole number in [1, 1048576]")
        whole("conv_size", self.conv_size, 2, 64, "a whole number in [2, 64]")
        flag("bias", self.bias)

    def resized(self, hidden_size: int) -> ShortConv:
        return dataclasses.replace(self, channels=hidden_size)

    def units(self) -> int:
        return self.channels

    def state(self, batch: int, dtype: DTypeLike) -> LayerState:
        return LayerState((jnp.zeros((batch, self.conv_size - 1, self.channels), dtype),))


class GatedShortConv(nn.Module):
    """A layer's gated short convolution."""

    config: TransformerConfig
    mixer: ShortConv
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: LayerState | None, visible: Array | None
    ) -> tuple[Array, LayerState]:
        """Computes a mixer's output and its memory; as `mixers.gated_delta.GatedDeltaNet`."""
        del rotations
        c, m = self.config, self.mixer
        memory = m.state(len(x), x.dtype) if memory is None else memory

        def project(name: str) -> Array:
            axes = ("embed", "states")
            return self.dense(m.channels, axes, m.bias, c.init_scale, name=name)(x)

        before, after, inner = project("b"), project("c"), project("x")
        inputs, size = before * inner, (m.conv_size, m.channels)
        init, zeros = nn.initializers.normal(c.init_scale), nn.initializers.zeros_init()
        kernel = named_param(self, "conv_x", init, ("conv", "states"), size)
        mixed = convolve(inputs, memory.columns[0], kernel, visible)
        if m.bias:
            mixed = mixed + named_param(self, "conv_x_bias", zeros, ("states",), size[1:])
        axes = ("states", "embed")
        down = self.dense(c.hidden_size, axes, m.bias, residual_scale(c), name="o")
        return down(after * mixed), memory.stage(Staged((inputs,)))
