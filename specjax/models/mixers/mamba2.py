"""Mamba2: a state that decays by one number a head, and adds an outer product for each token.

    h_t = e^(d_t A) h_(t-1) + d_t B_t x_t^T        y_t = h_t^T C_t + D x_t

x, B and C are projections of the layer's input after short convolutions, and d = softplus(...) > 0
is a projection too.  A group of heads shares B and C.  This is the recurrence of `outer_products`
with the key B, the query C, the value d x and the gate d A.

Reference: Dao and Gu 2024, arXiv 2405.21060, section 7.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import chosen, flag, real, settle, typed, whole
from specjax.caches import LayerState
from specjax.models.config import Beside, Mixer, TransformerConfig
from specjax.models.layers import Dense, aside, named_param, residual_scale, scaled
from specjax.models.mixers.attention import Rotations
from specjax.models.mixers.convolution import convolve_each
from specjax.models.mixers.outer_products import stage_read

NORMS = (None, "after_gate", "before_gate")
"""The output before its projection: y silu(z), norm(y silu(z)), or norm(y) silu(z)."""


@dataclasses.dataclass(frozen=True)
class Scales:
    """The factors of muP (Yang et al. 2022, arXiv 2203.03466): of the input, what is projected
    from it, and the output."""

    input: float = 1.0
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    output: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name, value in vars(self).items():
            real(name, value, "[-3.4e38, 3.4e38]")


@dataclasses.dataclass(frozen=True)
class Mamba2(Mixer):
    """The sizes and switches of a Mamba2 layer."""

    heads: int
    head_dim: int
    state_dim: int  # of B and C
    groups: int = 1  # of heads; each has its B and C, and the norm is over each
    conv_size: int = 4  # tokens that the convolutions of x, B and C read
    conv_bias: bool = True
    bias: bool = False  # of the projections of the input
    out_bias: bool = False
    norm: str | None = "after_gate"  # of `NORMS`
    scales: Scales = dataclasses.field(default_factory=Scales)
    beside: Beside | None = None

    def module(self) -> type[Mamba2Layer]:
        return Mamba2Layer

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name in ("heads", "head_dim", "state_dim", "groups"):
            whole(name, getattr(self, name), 1, 2**14, "a whole number in [1, 16384]")
        whole("conv_size", self.conv_size, 2, 64, "a whole number in [2, 64]")
        for name in ("conv_bias", "bias", "out_bias"):
            flag(name, getattr(self, name))
        chosen("norm", self.norm, NORMS)
        typed("a Scales", Scales, scales=self.scales)
        typed("a Beside, or None for no attention", Beside | None, beside=self.beside)
        settle(
            (
                self.heads % self.groups,
                f"heads={self.heads} is not a multiple of groups={self.groups}",
            )
        )

    @property
    def size(self) -> int:
        """Returns the numbers of x, of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> dict[str, int]:
        """Returns the names and numbers of what is convolved, in the order of files."""
        return {"x": self.size, **dict.fromkeys("bc", self.groups * self.state_dim)}

    def attention(self) -> Beside | None:
        return self.beside

    def units(self) -> int:
        return self.groups

    def state(self, batch: int, dtype: DTypeLike) -> LayerState:
        sizes = self.convolved.values()
        columns = tuple(jnp.zeros((batch, self.conv_size - 1, size), dtype) for size in sizes)
        shape = (batch, self.heads, self.state_dim, self.head_dim)
        return LayerState(columns, jnp.zeros(shape, jnp.float32))


class Mamba2Layer(nn.Module):
    """A layer's Mamba2; its state, its gates and its norm are float32 whatever the weights are."""

    config: TransformerConfig
    mixer: Mamba2
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: LayerState | None, visible: Array | None
    ) -> tuple[Array, LayerState]:
        """Computes a mixer's output and its memory; as `mixers.gated_delta.GatedDeltaNet`."""
        del rotations
        c, m = self.config, self.mixer
        memory = m.state(len(x), x.dtype) if memory is None else memory
        x = scaled(x, m.scales.input)

        def project(name: str, features: int, x: Array = x) -> Array:
            axes = ("embed", "states")
            y = self.dense(features, axes, m.bias, c.init_scale, name=name)(x)
            return scaled(y, getattr(m.scales, name))

        def small(name: str, start: float, size: int) -> Array:
            filled = nn.initializers.constant(start)
            return named_param(self, name, filled, ("states",), (size,)).astype(jnp.float32)

        inputs = {name: project(name, size) for name, size in m.convolved.items()}
        mixed = convolve_each(
            self, inputs, memory.columns, m.conv_size, c.init_scale, visible, m.conv_bias
        )
        mixed = {name: y.astype(jnp.float32) for name, y in mixed.items()}
        key, query = (
            mixed[name].reshape(*x.shape[:2], m.groups, m.state_dim) for name in ("b", "c")
        )
        value = mixed["x"].reshape(*x.shape[:2], m.heads, m.head_dim)
        step = project("dt", m.heads, aside(x)).astype(jnp.float32) + small("dt_bias", 1.0, m.heads)
        step = jax.nn.softplus(step)
        gate = -jnp.exp(small("A_log", 0.0, m.heads)) * step
        columns, added = tuple(inputs.values()), step[..., None] * value
        out, staged = stage_read(
            memory, columns, query, key, added, gate, None, visible, c.exact_states
        )
        out = out + small("D", 1.0, m.heads)[:, None] * value
        out = out.reshape(*x.shape[:2], m.size)
        z = nn.silu(project("z", m.size).astype(jnp.float32))
        if m.norm == "before_gate":
            out = self._normed(out, small("norm", 1.0, m.size)) * z
        else:
            out = out * z
            if m.norm == "after_gate":
                out = self._normed(out, small("norm", 1.0, m.size))
        axes = ("states", "embed")
        down = self.dense(c.hidden_size, axes, m.out_bias, residual_scale(c), name="o")
        return scaled(down(out.astype(x.dtype)), m.scales.output), staged

    def _normed(self, x: Array, weight: Array) -> Array:
        """Returns the RMS norm over each group of heads."""
        parts = x.reshape(*x.shape[:2], self.mixer.groups, -1)
        square = jnp.mean(parts * parts, axis=-1, keepdims=True)
        return weight * (parts * jax.lax.rsqrt(square + self.config.norm_eps)).reshape(x.shape)
