"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and the ways to stretch them to longer texts."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Rope:
    """Base and scaling.  `kind` is one of `default`, `linear`, `llama3`; the other fields serve the scaled kinds."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def frequencies(self, dim: int) -> np.ndarray:
        """[dim / 2] radians per position."""
        freq = 1.0 / self.theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        if self.kind == "linear":  # Chen et al. 2023, arXiv 2306.15595
            return freq / self.factor
        if self.kind == "llama3":
            # Long wavelengths are stretched by `factor`, short ones are kept, those between are blended.
            wavelength = 2 * math.pi / freq
            span = self.high_freq_factor - self.low_freq_factor
            keep = (self.original_max_positions / wavelength - self.low_freq_factor) / span
            keep = np.clip(keep, 0, 1)
            return (1 - keep) * freq / self.factor + keep * freq
        return freq

    def rotations(self, positions: Array, dim: int) -> tuple[Array, Array]:
        """[B, N] positions -> cosines and sines, each [B, N, 1, dim / 2] float32."""
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies(dim)
        # The barrier keeps XLA from computing them again inside every layer.
        return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(x: Array, rotations: tuple[Array, Array]) -> Array:
    """Rotate [B, N, H, D]: feature i pairs with feature i + D/2, as in the Hugging Face checkpoints."""
    cos, sin = rotations
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
