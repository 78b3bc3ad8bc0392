"""Multi-head latent attention: a token's cache is one small vector that all heads share.

    c = norm(x W_kva[:r])        the latent vector of a token, r numbers
    p = rope(x W_kva[r:])        a key with positions that all heads share
    k_h = [W_uk_h c, p]          the key of head h
    v_h = W_uv_h c               its value

Only c and p are kept.  A pass over a cache is *absorbed*: since q . (W_uk c) = (W_uk^T q) . c, the
queries are brought into the space of the latent vectors, attend there as the heads of a single key
head, and their mixed latent vectors become values afterwards.  So a pass reads r + R numbers of a
token, whatever the number of heads, and a tree of drafts is one product with many rows.  Without a
cache (in training) keys and values are computed, which takes fewer multiplications.

Reference: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import real, whole
from specjax.caches import Memory
from specjax.models.attention import attend, causal_attend
from specjax.models.config import Mixer, TransformerConfig
from specjax.models.layers import Dense, Norm, apart, named_param, residual_scale
from specjax.models.mixers.attention import Rotations
from specjax.models.products import dot_general, float32_dot_general
from specjax.models.rope import rotate

_MOST = 2**20


@dataclasses.dataclass(frozen=True)
class Latent(Mixer):
    """The sizes of latent attention; the number of heads is that of the configuration."""

    kv_rank: int  # r, the numbers of a latent vector
    nope_dim: int  # of a head's query and key, without positions
    rope_dim: int  # R, of a head's query and of the shared key, with positions
    value_dim: int  # of a head's value
    q_rank: int | None = None  # queries are a product of two matrices through this size
    norm_eps: float = 1e-6  # of the norms of latent vectors

    def module(self) -> type[LatentAttention]:
        return LatentAttention

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"):
            value = getattr(self, name)
            if name != "q_rank" or value is not None:
                whole(name, value, 1, _MOST, f"a whole number in [1, {_MOST}]")
        real("norm_eps", self.norm_eps, "[0, 3.4e38]")

    @property
    def key_dim(self) -> int:
        """Returns the numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    def slots(self) -> tuple[int, int, int]:
        """Returns the sizes of the cache: the shared key, and the latent vector as its value."""
        return 1, self.rope_dim, self.kv_rank

    def state(self, batch: int, dtype: DTypeLike) -> NoReturn:
        raise TypeError("latent attention keeps slots for its tokens, and no state")

    def rotated(self) -> int:
        return self.rope_dim


class LatentAttention(nn.Module):
    """Latent attention, which stages the shared key and the latent vectors if there is a cache."""

    config: TransformerConfig
    sizes: Latent
    dense: Callable[..., Dense]

    @nn.compact
    def __call__(
        self, x: Array, rotations: Rotations, memory: Memory | None, visible: Array | None
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the output, and the shared keys and latent vectors with the new ones staged.

        The arguments are those of `models.mixers.attention.Attention`.
        """
        c, s = self.config, self.sizes
        batch, width, _ = x.shape
        heads, wide = c.num_heads, c.num_heads * s.key_dim

        def project(name: str, y: Array, features: int, axes: tuple[str, str], bias: bool) -> Array:
            return apart(self.dense(features, axes, bias, c.init_scale, name=name)(y))

        def norm(name: str, y: Array) -> Array:
            return Norm(c, "rms", "latent", s.norm_eps, name=name)(y)

        # Matrices that read a latent vector name its axis "embed", which training splits.
        def up(name: str, dim: int) -> Array:
            init = nn.initializers.normal(c.init_scale)
            axes = ("heads", "head_dim", "embed")
            return named_param(self, name, init, axes, (heads, dim, s.kv_rank))

        def turn(y: Array) -> Array:
            return y if rotations is None else rotate(y, rotations, c.interleaved)

        if s.q_rank is None:
            query = project("q", x, wide, ("embed", "heads"), False)
        else:
            low = project("q_a", x, s.q_rank, ("embed", "latent"), c.qkv_bias)
            query = project("q_b", norm("q_norm", low), wide, ("embed", "heads"), False)
        query = query.reshape(batch, width, heads, s.key_dim)
        if rotations is not None and len(rotations) == 3:
            query = query * rotations[2].astype(query.dtype)
        plain, turned = query[..., : s.nope_dim], turn(query[..., s.nope_dim :])
        both = project("kv_a", x, s.kv_rank + s.rope_dim, ("embed", "latent"), c.qkv_bias)
        latent = norm("kv_norm", both[..., : s.kv_rank])[:, None]
        shared = turn(both[..., None, s.kv_rank :]).swapaxes(1, 2)
        w_key, w_value = up("key_up", s.nope_dim), up("value_up", s.value_dim)
        if memory is not None:
            shared, latent = memory.stage(shared, latent)
        scale = s.key_dim**-0.5 if c.query_scale is None else c.query_scale
        if visible is None:
            mixed = _expanded(plain, turned, shared, latent, w_key, w_value, scale)
        else:
            absorbed = _by_head(plain, w_key, 1)
            mixed = attend((absorbed, turned), (latent, shared), latent, visible, scale)
            mixed = _by_head(mixed.reshape(batch, width, heads, s.kv_rank), w_value, 2)
            mixed = mixed.reshape(batch, width, heads * s.value_dim)
        out = self.dense(c.hidden_size, ("heads", "embed"), c.out_bias, residual_scale(c), name="o")
        return out(mixed), (shared, latent)


def _by_head(x: Array, weight: Array, summed: int) -> Array:
    """Multiplies [B, N, H, D] by a matrix of each head, whose axis `summed` has D numbers."""
    batch, width, heads, _ = x.shape
    rows = x.transpose(2, 0, 1, 3).reshape(heads, batch * width, -1)
    y = float32_dot_general(rows, weight, (((2,), (summed,)), ((0,), (0,)))).astype(x.dtype)
    return y.reshape(heads, batch, width, -1).transpose(1, 2, 0, 3)


def _expanded(
    plain: Array,
    turned: Array,
    shared: Array,
    latent: Array,
    w_key: Array,
    w_value: Array,
    scale: float,
) -> Array:
    """Computes causal attention to the keys and values of each head.

    Args:
      plain, turned: [B, N, H, D] the parts of the queries without and with positions.
      shared, latent: [B, 1, N, D] as they are cached.
      w_key, w_value: [H, D, r].
      scale: of the scores.

    Returns:
      [B, N, H * V].
    """
    batch, width, heads, _ = plain.shape

    def of_heads(weight: Array) -> Array:
        flat = weight.reshape(-1, weight.shape[2])
        y = dot_general(latent[:, 0], flat, (((2,), (1,)), ((), ())))
        return y.reshape(batch, width, heads, -1).swapaxes(1, 2)

    everywhere = jnp.broadcast_to(shared, (batch, heads, *shared.shape[2:]))
    keys = jnp.concatenate([of_heads(w_key), everywhere], axis=-1)
    query = jnp.concatenate([plain, turned], axis=-1)
    return causal_attend(query, keys, of_heads(w_value), scale)
