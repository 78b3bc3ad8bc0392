"""The decoder-only transformer that all families share.

A family is a configuration of it and a table of tensor names.  Layers are unrolled, each with its
own cache leaf: a scan over stacked layers would slice every weight and cache leaf in each
iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax._internal.platforms import on_cpu
from specjax.caches import KVCache, Memory, WindowedCache
from specjax.models.attention import attend, causal_attend, cpu_attend
from specjax.models.config import TransformerConfig
from specjax.models.layers import MLP, Dense, Experts, Norm, look_up, named_param, residual_scale
from specjax.models.products import dot_general
from specjax.models.rope import rotate
from specjax.types import ModelOutput

_Rotations = tuple[Array, Array] | None
_Memory = KVCache | None  # the cache of one layer


class Attention(nn.Module):
    """Grouped-query attention, which stages its keys and values if there is a cache."""

    config: TransformerConfig
    window: int | None
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend

    @nn.compact
    def __call__(
        self, x: Array, rotations: _Rotations, memory: Memory | None, visible: Array | None
    ) -> tuple[Array, Array, Array]:
        c = self.config
        batch, width, _ = x.shape

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
            if normed and c.qk_norm == "head":
                y = Norm(c, "rms", "head_dim", name=f"{name}_norm")(y)
            return rotate(y, rotations) if normed and rotations is not None else y

        query = project("q", c.num_heads, normed=True)
        keys = project("k", c.num_kv_heads, normed=True).swapaxes(1, 2)
        values = project("v", c.num_kv_heads).swapaxes(1, 2)
        if memory is not None:
            keys, values = memory.stage(keys, values)
        if visible is None:
            mixed = causal_attend(
                query, keys, values, c.query_scale, c.attention_softcap, self.window
            )
        else:
            mixed = self.attend(query, keys, values, visible, c.query_scale, c.attention_softcap)
        out = self.dense(c.hidden_size, ("heads", "embed"), c.out_bias, residual_scale(c), name="o")
        return out(mixed), keys, values


class Layer(nn.Module):
    """Attention, then an MLP, each added to the residual stream.

    `config.norm_order` says where the norms are.
    """

    config: TransformerConfig
    index: int
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend

    @nn.compact
    def __call__(
        self, x: Array, rotations: _Rotations, memory: Memory | None, visible: Array | None
    ) -> tuple[Array, Array, Array]:
        c = self.config

        def norm(name: str, y: Array) -> Array:
            return Norm(c, name=name)(y)

        before = c.norm_order in ("pre", "sandwich", "parallel")
        after = c.norm_order in ("post", "sandwich")
        window = c.window_of(self.index)
        attention = Attention(c, window, self.dense, self.attend, name="attention")
        mixed, keys, values = attention(
            norm("attention_norm", x) if before else x, rotations, memory, visible
        )
        mlp = (Experts if c.is_sparse(self.index) else MLP)(c, self.dense, name="mlp")
        if c.norm_order == "parallel":
            return x + mixed + mlp(norm("mlp_norm", x)), keys, values
        x = x + (norm("attention_post_norm", mixed) if after else mixed)
        x = norm("attention_post_norm", x) if c.norm_order == "after" else x
        added = mlp(norm("mlp_norm", x) if before else x)
        x = x + (norm("mlp_post_norm", added) if after else added)
        return norm("mlp_post_norm", x) if c.norm_order == "after" else x, keys, values


class Transformer(nn.Module):
    """The decoder-only transformer: from tokens to logits and hidden states.

    `models.base.LinenModel` makes it a `contract.Model`.

    Attributes:
      config: sizes and switches.
      dot_general: multiplies with weights, like `models.products.dot_general`: training passes one
        that multiplies in bfloat16, and `load` one with kernels of our own for a CPU.  (Experts
        multiply with `jax.lax.ragged_dot`.)
      attend: attends to the slots of a cache, like `models.attention.attend`; `load` passes one
        with a kernel of our own for a CPU.
      separate_head: keep a second copy of a tied embedding as the output matrix, in the layout of
        the other kernels.
      transposed: hold kernels as [out, in].  On XLA:CPU several rows of float32 are up to 2.6 times
        faster with [in, out], and of bfloat16 up to 1.8 times faster with [out, in]; accelerators
        show no difference.
      remat: recompute the activations inside a layer in the backward pass instead of keeping them.
    """

    config: TransformerConfig
    dot_general: Callable[..., Array] = dot_general
    separate_head: bool = False
    transposed: bool = False
    remat: bool = False
    attend: Callable[..., Array] = attend

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def num_taps(self) -> int:
        return self.config.num_layers + 2

    def init_cache(self, batch: int, size: int, dtype: DTypeLike) -> KVCache:
        """Returns an empty cache of `size` slots a row; layers with a window may have rings."""
        c = self.config
        form = WindowedCache if c.windows else KVCache
        cache = form.zeros(c.num_layers, batch, c.num_kv_heads, size, c.head_dim, dtype)
        cache = dataclasses.replace(cache, by_kernel=self.attend is cpu_attend)
        return dataclasses.replace(cache, windows=c.windows) if c.windows else cache

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        positions: Array,
        cache: KVCache | None = None,
        mask: Array | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Runs one pass, with the shapes of `contract.Model.apply`.

        With L layers, tap L is the output of the last layer, and tap L + 1 that output after the
        final norm.
        """
        c = self.config
        size = c.embedding_size or c.hidden_size

        def table(name: str, rows: int, features: int, axes: tuple[str, str]) -> Array:
            init = nn.initializers.normal(c.init_scale)
            return named_param(self, name, init, axes, (rows, features))

        dense = functools.partial(Dense, dot_general=self.dot_general, transposed=self.transposed)

        def linear(name: str, features: int, axes: tuple[str, str]) -> Dense:
            return dense(features, axes, False, c.init_scale, name=name)

        embedding = table("embedding", c.vocab_size, size, ("vocab", "embed"))
        x = look_up(embedding, tokens)
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        if c.embedding_size is not None:
            x = linear("project_in", c.hidden_size, ("embed_in", "embed"))(x)
        if c.position_offset is not None:
            rows = c.max_positions + c.position_offset
            learned = table("positions", rows, c.hidden_size, ("positions", "embed"))
            x = x + look_up(learned, positions + c.position_offset)

        # Layers of one kind share their rotations and masks.
        ropes = {c.rope_of(i) for i in range(c.num_layers)}
        rotations = {
            rope: None if rope is None else rope.rotations(positions, c.head_dim) for rope in ropes
        }
        kinds = {
            c.window_of(i): None if cache is None else cache.layer(i) for i in range(c.num_layers)
        }
        visible = {
            window: _visible(window, positions, memory, mask) for window, memory in kinds.items()
        }
        keys, values, streams = [], [], [x]
        block = nn.remat(Layer) if self.remat else Layer
        for i in range(c.num_layers):
            memory = None if cache is None else cache.layer(i)
            layer = block(c, i, dense, self.attend, name=f"layer_{i}")
            x, k, v = layer(x, rotations[c.rope_of(i)], memory, visible[c.window_of(i)])
            streams.append(x)
            keys.append(k)
            values.append(v)
        hidden = Norm(c, name="norm")(x) if c.final_norm else x
        streams.append(hidden)
        if c.embedding_size is not None:
            hidden = linear("project_out", size, ("embed", "embed_in"))(hidden)
        if c.tied_embeddings and not self.separate_head:
            logits = self.dot_general(hidden, embedding, (((hidden.ndim - 1,), (1,)), ((), ())))
        else:
            logits = linear("head", c.vocab_size, ("embed", "vocab"))(hidden)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits.astype(jnp.float32) / c.logit_softcap)
        if cache is not None:
            cache = dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))
        features = jnp.concatenate([streams[tap] for tap in taps], axis=-1) if taps else None
        return ModelOutput(logits, hidden, cache, features)


def _visible(
    window: int | None, positions: Array, memory: _Memory, mask: Array | None
) -> Array | None:
    """Returns [B, N, S] bool: the slots (without a cache: tokens) that each token attends to.

    None means plain causal attention.
    """
    if memory is not None:
        return memory.visible(positions, mask, window)
    if mask is None or window is None:
        return mask
    return mask & (positions[:, :, None] - positions[:, None] < window)


class Head(TypedDict):
    """The parameters of an output matrix: `kernel`, or its transpose `weight`."""

    kernel: NotRequired[Array]  # [E, V]
    weight: Array  # [V, E]


class Tables(TypedDict, total=False):
    """The parameters of a network that belong to its vocabulary."""

    embedding: Array  # [V, E]
    head: Head  # where it is not the embedding


def head_matrix(params: Tables | dict[str, Any]) -> Array:
    """Returns the output matrix [E, V] that maps hidden states to logits."""
    if "head" not in params:
        assert "embedding" in params
        return params["embedding"].T
    head = params["head"]
    return head["kernel"] if "kernel" in head else head["weight"].T
