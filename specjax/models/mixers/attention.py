"""Attention, the mixer of most layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NoReturn

from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.checks import flag, whole
from specjax.caches import ChoosingCache, Memory
from specjax.models.attention import attend, causal_attend, gpu_attend, gpu_stage_and_attend
from specjax.models.config import Mixer, TransformerConfig
from specjax.models.layers import (
    Dense,
    Norm,
    apart,
    named_param,
    residual_scale,
    scaled,
    unit_rms,
)
from specjax.models.rope import rotate

Rotations = tuple[Array, ...] | None


@dataclasses.dataclass(frozen=True)
class AttentionSizes(Mixer):
    """The sizes of attention in a layer where they are not those of the configuration."""

    num_kv_heads: int
    head_dim: int
    keys_as_values: bool = False  # values are the keys before their norm and rope
    shared: bool = False  # keys and values are those of an earlier layer (`Mixer.shares`)

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and the allowed values."""
        for name in ("num_kv_heads", "head_dim"):
            whole(name, getattr(self, name), 1, 2**14, "a whole number in [1, 16384]")
        for name in ("keys_as_values", "shared"):
            flag(name, getattr(self, name))

    def module(self) -> type[Attention]:
        return Attention

    def slots(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.head_dim, self.head_dim

    def state(self, batch: int, dtype: DTypeLike) -> NoReturn:
        raise TypeError("attention keeps slots for its tokens, and no state")

    def kv_heads(self) -> int:
        return self.num_kv_heads

    def rotated(self) -> int:
        return self.head_dim

    def shares(self) -> bool:
        return self.shared


class Attention(nn.Module):
    """Grouped-query attention, which stages its keys and values if there is a cache."""

    config: TransformerConfig
    window: int | None
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend
    sizes: AttentionSizes | None = None  # None: those of `config`
    key_scale: float = 1.0
    in_parts: bool = False  # of the output, as `Dense` returns them

    @nn.compact
    def __call__(
        self,
        x: Array,
        rotations: Rotations,
        memory: Memory | ChoosingCache | tuple[Array, Array] | None,
        visible: Array | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Returns the output [B, N, E], and the layer's keys and values with the new ones staged.

        Args:
          x: [B, N, E].
          rotations: of the positions.
          memory: the layer's cache; None: there is none.  A layer that shares keys and values gets
            those of their owner, with the new ones staged.  A `ChoosingCache` gets the queries.
          visible: [B or 1, N, S] bool, the slots (without a cache: tokens) that each token attends
            to; None: causal.  With a cache only `gpu_attend` takes None.
        """
        c = self.config
        s = self.sizes or AttentionSizes(c.num_kv_heads, c.head_dim)
        batch, width, _ = x.shape

        def project(name: str, heads: int) -> Array:
            axis = "heads" if name == "q" else "kv_heads"
            dense = self.dense(
                heads * s.head_dim, ("embed", axis), c.qkv_bias, c.init_scale, name=name
            )
            return apart(dense(x))

        turns = rotations is not None and rotations[0].shape[-1] > 0

        def turned(y: Array) -> Array:
            return rotate(y, rotations, c.interleaved) if rotations and turns else y

        def prepared(name: str, y: Array, heads: int) -> Array:
            axis = "heads" if name == "q" else "kv_heads"
            if c.qk_norm == "whole":
                y = Norm(c, "rms", axis, name=f"{name}_norm")(y)
            y = y.reshape(batch, width, heads, s.head_dim)
            y = turned(y) if c.qk_norm_last else y
            if c.qk_norm == "head":
                y = Norm(c, "rms", "head_dim", name=f"{name}_norm")(y)
            if c.qk_norm == "heads":
                y = Norm(c, "centred", (axis, "head_dim"), name=f"{name}_norm")(y)
            if c.qk_norm == "unit" and turns:
                y = unit_rms(y, c.norm_eps).astype(y.dtype)
            return y if c.qk_norm_last else turned(y)

        query = prepared("q", project("q", c.num_heads), c.num_heads)
        if rotations is not None and len(rotations) == 3:  # the rope has `growth`
            query = query * rotations[2].astype(query.dtype)
        fresh: tuple[Array, Array, Memory] | None = None  # that attention stages itself
        if isinstance(memory, tuple):
            keys, values = memory
        else:
            k = project("k", s.num_kv_heads)
            v = k if s.keys_as_values else project("v", s.num_kv_heads)
            v = v.reshape(batch, width, s.num_kv_heads, s.head_dim)
            if c.value_norm:
                v = unit_rms(v, c.norm_eps).astype(v.dtype)
            k = scaled(prepared("k", k, s.num_kv_heads), self.key_scale)
            keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
            if isinstance(memory, ChoosingCache):
                memory = memory.chosen(query)
            if memory is not None and self.attend is gpu_attend:
                fresh = k, v, memory
            elif memory is not None:
                keys, values = memory.stage(keys, values)
        scaling, sinks = (c.query_scale, c.attention_softcap), None
        if c.sinks:
            init = nn.initializers.normal(c.init_scale)
            sinks = named_param(self, "sinks", init, ("heads",), (c.num_heads,))
        if fresh is not None:
            mixed, (keys, values) = gpu_stage_and_attend(
                query, *fresh, visible, *scaling, sinks, self.window
            )
        elif visible is None:
            mixed = causal_attend(query, keys, values, *scaling, self.window, sinks)
        else:
            mixed = self.attend(query, keys, values, visible, *scaling, sinks)
        if c.output_gate:
            wide = c.num_heads * s.head_dim
            gate = self.dense(wide, ("embed", "heads"), c.qkv_bias, c.init_scale, name="gate")(x)
            mixed = mixed * nn.sigmoid(gate)
        dense = functools.partial(self.dense, in_parts=True) if self.in_parts else self.dense
        out = dense(c.hidden_size, ("heads", "embed"), c.out_bias, residual_scale(c), name="o")
        return out(mixed), (keys, values)
