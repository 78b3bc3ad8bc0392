"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), and scalings for longer texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax._internal.checks import chosen, flag, real, typed
from specjax._internal.platforms import by_platform

_NUMBERS = {
    "theta": "(1, 3.4e38]",
    "fraction": "(0, 1]",
    **dict.fromkeys(
        ("amplitude", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions",
         "beta_fast", "beta_slow"), "(0, 3.4e38]",
    ),
    **dict.fromkeys(("mscale_all_dim", "growth"), "[0, 3.4e38]"),
}  # fmt: skip
"""Fields that are numbers which float32 holds, and the interval of each."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """The base and the scaling of the frequencies; `kind` is a key of `SCALINGS`.

    A rope of the kind "none" turns nothing, and its queries may grow nevertheless (Llama 4).
    """

    theta: float = 10000.0
    kind: str = "default"
    fraction: float = 1.0  # of the head's dimensions that are rotated
    amplitude: float = 1.0  # factor of cosines and sines, so scores grow by its square
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()  # a divisor for each frequency
    # Of a yarn rope: latent attention multiplies its scores by `yarn_growth` of it, squared.
    mscale_all_dim: float = 0.0
    # Queries at position p are multiplied by 1 + growth ln(1 + floor(p / original_max_positions)),
    # or by that of p + 1 if the positions are `counted_from_one`.
    growth: float = 0.0
    counted_from_one: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        chosen("kind", self.kind, SCALINGS)
        flag("truncate", self.truncate)
        flag("counted_from_one", self.counted_from_one)
        typed("a tuple of numbers", tuple, factors=self.factors)
        for name, interval in _NUMBERS.items():
            real(name, getattr(self, name), interval)
        for factor in self.factors:
            real("factors", factor, "(0, 3.4e38]")
        if self.kind == "llama3":
            least = self.low_freq_factor
            real("high_freq_factor", self.high_freq_factor, f"[{least}, inf)", ", low_freq_factor")

    def turned(self, dim: int) -> int:
        """Returns R, the number of dimensions of a head that are rotated."""
        if self.kind == "none":
            return 0
        return dim if self.kind == "proportional" else int(dim * self.fraction)

    def frequencies(self, dim: int) -> np.ndarray:
        """Returns [R / 2] radians per position, for heads of `dim` dimensions."""
        turned = self.turned(dim)
        freq = 1.0 / self.theta ** (np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned))
        return SCALINGS[self.kind](self, freq).astype(np.float32)

    def rotations(self, positions: Array, dim: int, held: bool = False) -> tuple[Array, ...]:
        """Maps [B, N] positions to cosines and sines, each [B, N, 1, R / 2] float32.

        A rope with `growth` adds the factors of the queries, [B, N, 1, 1] float32.

        Args:
          held: what reads them takes arrays, as a kernel of our own does, so XLA computes them once
            in any case.
        """
        angles = positions[..., None, None].astype(jnp.float32) * self.frequencies(dim)
        found = jnp.cos(angles) * self.amplitude, jnp.sin(angles) * self.amplitude
        if self.kind != "none" and not held:
            forms = {"cpu": _computed_once, "cuda": _by_one_kernel, "rocm": _by_one_kernel}
            found = by_platform(forms, jax.lax.optimization_barrier, found)
        if not self.growth:
            return found
        reached = positions[..., None, None] + int(self.counted_from_one)
        stretches = reached // int(self.original_max_positions)
        return *found, 1 + self.growth * jnp.log1p(stretches.astype(jnp.float32))


def _computed_once(found: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the same numbers, after a product with the identity matrix.

    XLA:CPU drops barriers before it fuses, and would compute each cosine again in every layer and
    head.  It fuses nothing across a matrix product.
    """
    both = jnp.stack(found)
    size = both.shape[-1]
    dimensions = (((1,), (0,)), ((), ()))
    same = jax.lax.dot_general(
        both.reshape(-1, size), np.eye(size, dtype=np.float32), dimensions, precision="highest"
    ).reshape(both.shape)
    return same[0], same[1]


def _by_one_kernel(found: tuple[Array, Array]) -> tuple[Array, Array]:
    both = jax.lax.optimization_barrier(jnp.stack(found))
    return both[0], both[1]


def _llama3(rope: Rope, freq: np.ndarray) -> np.ndarray:
    """Scales as Llama 3: stretches long wavelengths by `factor`, keeps short ones, and blends.

    Llama 4 blends nothing: its two factors are the same.
    """
    span = rope.high_freq_factor - rope.low_freq_factor or 1e-30
    keep = (rope.original_max_positions * freq / (2 * math.pi) - rope.low_freq_factor) / span
    keep = np.clip(keep, 0, 1)
    return (1 - keep) * freq / rope.factor + keep * freq


def _yarn(rope: Rope, freq: np.ndarray) -> np.ndarray:
    """YaRN: the same blend, but linear in the index of the frequency.

    Reference: Peng et al. 2023, arXiv 2309.00071, section 3.2.
    """

    def index(turns: float) -> float:
        """Returns the index of the frequency that makes `turns` turns over the original context."""
        return (
            len(freq)
            * math.log(rope.original_max_positions / (turns * 2 * math.pi))
            / math.log(rope.theta)
        )

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(freq) - 1)
    stretch = np.clip((np.arange(len(freq), dtype=np.float32) - low) / (high - low or 0.001), 0, 1)
    return stretch * freq / rope.factor + (1 - stretch) * freq


def _proportional(rope: Rope, freq: np.ndarray) -> np.ndarray:
    """Keeps the first `fraction` of the frequencies of a whole head; the others become 0.

    So a pair i of a rotated dimension is i + D / 2, whatever the fraction is (Gemma 4).
    """
    kept = int(rope.fraction * 2 * len(freq)) // 2
    return np.where(np.arange(len(freq)) < kept, freq, 0.0) / rope.factor


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Returns the square root of the factor by which YaRN's scores grow (section 3.4, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


SCALINGS: dict[str, Callable[[Rope, np.ndarray], np.ndarray]] = {
    "none": lambda rope, freq: freq,  # of which there are none
    "default": lambda rope, freq: freq,
    "linear": lambda rope, freq: freq / rope.factor,  # Chen et al. 2023, arXiv 2306.15595
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    # Ding et al. 2024, arXiv 2402.13753
    "longrope": lambda rope, freq: freq / np.array(rope.factors, np.float32),
}


def rotate(x: Array, rotations: tuple[Array, ...], interleaved: bool = False) -> Array:
    """Rotates the first R dimensions of [B, N, H, D].

    Dimension i pairs with i + R/2, as in most Hugging Face files.  If `interleaved`, dimension 2i
    pairs with 2i + 1, and the result has the dimensions in the order of the other form, which
    changes no product of two rotated vectors.
    """
    cos, sin = rotations[:2]
    half = cos.shape[-1]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
    return (
        turned
        if x.shape[-1] == 2 * half
        else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
    )
