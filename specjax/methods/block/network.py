"""`BlockDraft`: a few layers that fill a block of mask tokens in one pass (DFlash).

    position     0 ... start - 1          start    start + 1  ...  start + S - 1
    input        target's hidden states   anchor   mask       ...  mask
                 (keys and values only)   queries, keys and values

The *anchor* is the pending token.  The context before it is not read by the layers: its keys and
values are projections of the target's hidden states, `context`, and are the same whatever is
drafted.  So they stay in a KV cache, and only those of the block are dropped after each pass.

Reference: Chen, Liang and Liu 2026, "DFlash", arXiv 2602.06036, section 4.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax._internal.checks import settle, within
from specjax.caches import BranchCache, KVCache, Memory
from specjax.methods.block.convolution import Convolution
from specjax.methods.published import by_row
from specjax.models import (
    MLP,
    Dense,
    Norm,
    TransformerConfig,
    attend,
    cpu_attend,
    dot_general,
    residual_scale,
    rotate,
)
from specjax.parallel import Specs
from specjax.types import Weights

_Rotations = tuple[Array, ...]
_Cache = TypeVar("_Cache", KVCache, BranchCache)


@dataclasses.dataclass(frozen=True)
class BlockDraftConfig:
    """The sizes and switches of a block draft; hashable.

    Of `layers` the sizes, the norms, the rotary embedding and the windows are used.
    """

    layers: TransformerConfig
    feature_size: int  # of the target's hidden states at a token, all taps together
    block_size: int  # S, slots of a block, the anchor included
    mask_token: int
    # By layer: does a slot attend only to the slots before it, and to itself?
    causal: tuple[bool, ...] = ()  # (): by no layer
    # Does the window W of a layer stay with the block?  True: every slot sees the W tokens before
    # the anchor, and the block without a window.  False: the window moves with the slot, which sees
    # what is fewer than W positions away.
    anchored_windows: bool = False
    first_slot: int = 1  # the slot that predicts the token after the anchor: 0, or 1
    embedding_scale: float = 1.0  # of the rows of the embedding
    output_scale: float = 1.0  # of the logits
    logit_softcap: float | None = None  # c tanh(x / c), after `output_scale`
    # Convolutions over the slots of a block, around each branch (DFlash-2); 0: none.
    conv_size: int = 0  # slots that each slot reads, itself included
    conv_group: int = 1  # channels that share their dynamic kernel

    def __post_init__(self) -> None:
        c = self.layers
        within("first_slot", self.first_slot, 0, 1)
        least = 1 + self.first_slot
        within(
            "block_size", self.block_size, least, note=": a block holds the anchor and the drafts"
        )
        within("conv_size", self.conv_size, 0, self.block_size, ", the block_size")
        layers, group = c.num_layers, self.conv_group
        settle(
            (
                len(self.causal) not in (0, layers),
                f"causal has {len(self.causal)} entries for {layers} layers: pass one a layer",
            ),
            (
                self.anchored_windows and not c.windows,
                "anchored_windows=True, and no layer has a window: leave it out",
            ),
            (
                self.conv_size and (group < 1 or c.hidden_size % group),
                f"conv_group={group} does not divide the hidden size {c.hidden_size}",
            ),
        )

    @property
    def num_drafts(self) -> int:
        """D, the drafts of a block."""
        return self.block_size - self.first_slot

    def is_causal(self, layer: int) -> bool:
        """Returns whether a slot of a block sees only the slots before it in this layer."""
        return bool(self.causal) and self.causal[layer]

    def mask(self, layer: int) -> Array:
        """Returns [1, S, S] bool: the slots of the block that each slot attends to."""
        slot = jnp.arange(self.block_size)
        after = slot[:, None] - slot
        seen = (after >= 0) if self.is_causal(layer) else jnp.ones_like(after, bool)
        window = self.layers.window_of(layer)
        if window is None or self.anchored_windows:
            return seen[None]
        return (seen & (jnp.abs(after) < window))[None]

    def visible(self, layer: int, memory: KVCache | BranchCache, positions: Array) -> Array:
        """Returns [B, N, S] bool: the slots that each slot attends to, the context included.

        Args:
          layer: of the draft.
          memory: the cache of this layer, which holds the context.
          positions: [B, N] of the slots, block after block.
        """
        window = self.layers.window_of(layer)
        if window is not None and self.anchored_windows:
            # By the positions of their anchors all slots of a block see the same W tokens.
            anchors = positions[:, :: self.block_size]
            positions = jnp.repeat(anchors, self.block_size, axis=1)
            window += 1
        seen = memory.visible(positions, self.mask(layer), window)
        assert seen is not None  # the text is read before its branches
        return seen


class DraftAttention(nn.Module):
    """Grouped-query attention of a block to the context and to itself."""

    config: TransformerConfig
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend

    def setup(self) -> None:
        c = self.config

        def projection(heads: int, axis: str) -> Dense:
            return self.dense(heads * c.head_dim, ("embed", axis), c.qkv_bias, c.init_scale)

        self.q = projection(c.num_heads, "heads")
        self.k = projection(c.num_kv_heads, "kv_heads")
        self.v = projection(c.num_kv_heads, "kv_heads")
        self.o = self.dense(c.hidden_size, ("heads", "embed"), c.out_bias, residual_scale(c))
        if c.qk_norm == "head":
            self.q_norm = Norm(c, "rms", "head_dim")
            self.k_norm = Norm(c, "rms", "head_dim")

    def stage(self, x: Array, rotations: _Rotations, memory: Memory) -> tuple[Array, Array]:
        """Returns keys and values [B, K, S, D] of a layer, with those of `x` [B, T, H] staged."""
        c = self.config

        def heads(y: Array) -> Array:
            return y.reshape(*x.shape[:2], c.num_kv_heads, c.head_dim)

        keys = heads(self.k(x))
        keys = self.k_norm(keys) if c.qk_norm == "head" else keys
        return memory.stage(rotate(keys, rotations).swapaxes(1, 2), heads(self.v(x)).swapaxes(1, 2))

    def __call__(
        self, x: Array, rotations: _Rotations, memory: Memory, visible: Array
    ) -> tuple[Array, Array, Array]:
        c = self.config
        query = self.q(x).reshape(*x.shape[:2], c.num_heads, c.head_dim)
        query = self.q_norm(query) if c.qk_norm == "head" else query
        keys, values = self.stage(x, rotations, memory)
        mixed = self.attend(rotate(query, rotations), keys, values, visible, c.query_scale)
        return self.o(mixed), keys, values


class DraftLayer(nn.Module):
    """Attention, then an MLP, each added to the residual stream."""

    config: BlockDraftConfig
    dense: Callable[..., Dense]
    attend: Callable[..., Array] = attend

    def setup(self) -> None:
        c = self.config.layers
        self.attention_norm, self.mlp_norm = Norm(c), Norm(c)
        self.attention = DraftAttention(c, self.dense, self.attend)
        self.mlp = MLP(c, self.dense)
        if self.config.conv_size:
            size, group = self.config.conv_size, self.config.conv_group
            self.attention_conv = Convolution(size, group, self.dense)
            self.mlp_conv = Convolution(size, group, self.dense)

    def stage(self, x: Array, rotations: _Rotations, memory: Memory) -> tuple[Array, Array]:
        """Stages the context `x`, which is the same for every layer and is not normalised."""
        return self.attention.stage(x, rotations, memory)

    def __call__(
        self, x: Array, rotations: _Rotations, memory: Memory, visible: Array
    ) -> tuple[Array, Array, Array]:
        convolves = self.config.conv_size > 0
        y, after = self.attention_norm(x), None
        if convolves:
            y, after = self.attention_conv(y)
        y, keys, values = self.attention(y, rotations, memory, visible)
        x = x + (y if after is None else self.attention_conv.finish(y, after))
        y, after = self.mlp_norm(x), None
        if convolves:
            y, after = self.mlp_conv(y)
        y = self.mlp(y)
        return x + (y if after is None else self.mlp_conv.finish(y, after)), keys, values


class BlockDraft(nn.Module):
    """Maps the target's hidden states and a block of embeddings to hidden states of the block.

    Attributes:
      config: sizes and switches.
      dot_general, transposed, attend: as in `Transformer`.
    """

    config: BlockDraftConfig
    dot_general: Callable[..., Array] = dot_general
    transposed: bool = False
    attend: Callable[..., Array] = attend

    def setup(self) -> None:
        c = self.config.layers
        dense = functools.partial(Dense, dot_general=self.dot_general, transposed=self.transposed)
        self.fc = dense(c.hidden_size, ("features", "embed"), False, c.init_scale)
        self.hidden_norm, self.norm = Norm(c), Norm(c)
        self.layer = [DraftLayer(self.config, dense, self.attend) for _ in range(c.num_layers)]

    def init_cache(self, batch: int, size: int, dtype: jnp.dtype) -> KVCache:
        """Returns an empty cache of `size` slots for the context and a block."""
        c = self.config.layers
        cache = KVCache.zeros(c.num_layers, batch, c.num_kv_heads, size, c.head_dim, dtype)
        by_kernel = self.attend is cpu_attend
        return dataclasses.replace(cache, by_kernel=by_kernel, may_have_pages=True)

    def context(self, features: Array, cache: _Cache) -> _Cache:
        """Stages the target's hidden states [B, T, F] of the next T tokens of the text."""
        y = self.hidden_norm(self.fc(by_row(features, cache)))
        rotations = self._rotations(cache, features.shape[1])
        return cache.with_layers(
            [layer.stage(y, rotations[i], cache.layer(i)) for i, layer in enumerate(self.layer)]
        )

    def __call__(self, x: Array, cache: _Cache) -> tuple[Array, _Cache]:
        """Reads a block of embeddings [B, S, H] after the committed context.

        Returns:
          Its hidden states [B, S, H] after the final norm, and the cache with the block staged.
        """
        config = self.config
        width = x.shape[1]
        positions = cache.next_positions(width)
        rotations, staged = self._rotations(cache, width), []
        for i, layer in enumerate(self.layer):
            memory = cache.layer(i)
            visible = config.visible(i, memory, positions)
            x, *pair = layer(x, rotations[i], memory, visible)
            staged.append(pair)
        return self.norm(x), cache.with_layers(staged)

    def _rotations(self, cache: KVCache | BranchCache, width: int) -> list[_Rotations]:
        """Returns the rotations of the next `width` positions, by layer."""
        c = self.config.layers
        positions = cache.next_positions(width)
        ropes = [c.rope_of(i) for i in range(c.num_layers)]
        made = {
            rope: rope.rotations(positions, c.head_dim) for rope in set(ropes) if rope is not None
        }
        return [made[rope] for rope in ropes if rope is not None]


def stage_context(net: BlockDraft, params: Weights, features: Array, cache: _Cache) -> _Cache:
    """Runs `BlockDraft.context` with parameters."""
    return cast(_Cache, net.apply({"params": params}, features, cache, method=BlockDraft.context))


def read_block(net: BlockDraft, params: Weights, x: Array, cache: _Cache) -> tuple[Array, _Cache]:
    """Runs `BlockDraft.__call__` with parameters."""
    return cast(tuple[Array, _Cache], net.apply({"params": params}, x, cache))


def initial_block(net: BlockDraft, key: Array) -> Weights:
    """Makes random parameters of both methods; under `jax.eval_shape` their shapes."""
    return nn.meta.unbox(_boxed(net, key))


def block_axes(net: BlockDraft) -> Specs:
    """Returns the logical axes of every parameter, for `parallel.named_shardings`."""
    return nn.get_partition_spec(jax.eval_shape(lambda: _boxed(net, jax.random.key(0))))


def _boxed(net: BlockDraft, key: Array) -> Weights:
    c, config = net.config.layers, net.config
    features = jnp.zeros((1, 1, config.feature_size))
    x = jnp.zeros((1, config.block_size, c.hidden_size))

    def both(module: BlockDraft) -> None:
        cache = module.init_cache(1, config.block_size, jnp.dtype("float32"))
        module.context(features, cache)
        module(x, cache)

    return net.init(key, method=both)["params"]
