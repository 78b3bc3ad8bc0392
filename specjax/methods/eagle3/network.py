"""The network of EAGLE-3 heads: a few decoder layers over a target's features and embeddings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax.caches import BranchCache, KVCache, Memory
from specjax.kernels import MOST_TOKENS, LayersForm
from specjax.models import (
    MLP,
    Attention,
    Dense,
    Int8,
    Layer,
    Norm,
    TransformerConfig,
    attend,
    cpu_attend,
    dot_general,
    form_of_layers,
    int8_form,
    on_target,
    run_whole_layers,
    together_or_apart,
)
from specjax.parallel import Specs
from specjax.types import Weights


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Sizes and switches in which published heads differ."""

    layers: TransformerConfig  # of the decoder layers; its vocabulary is that of the drafts
    num_taps: int  # n layers of the target are read
    target_size: int  # hidden size of the target
    fuses: bool = True  # else there is one tap, and it is the feature
    norm_before_residual: bool = False  # the residual of the first layer is the normed feature
    norm_before_fc: bool = False  # one norm over all taps together
    fc_norm: bool = False  # one norm for each tap (EAGLE-3.1)
    feeds_normed: bool = False  # the state of a draft is fed back after the final norm (EAGLE-3.1)
    dot_general: Callable[..., Array] = dot_general  # as in `Transformer`
    attend: Callable[..., Array] = attend  # too

    def network(self, dot_general: Callable[..., Array] | None = None) -> Eagle3:
        """Returns the network of this configuration, which may multiply in another way."""
        return Eagle3(self, self.dot_general if dot_general is None else dot_general)

    def axes(self) -> Specs:
        """Returns the logical axes of the network's parameters."""
        return eagle3_axes(self)


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads an embedding concatenated with a feature.

    a = attention([norm(e), norm(f)]),    h = f + a,    output = h + mlp(norm(h))
    """

    config: Eagle3Config
    dense: Callable[..., Dense]

    def setup(self) -> None:
        c = self.config.layers
        self.embedding_norm, self.feature_norm, self.mlp_norm = (Norm(c) for _ in range(3))
        self.attention = Attention(c, c.window_of(0), self.dense, self.config.attend)
        self.mlp = MLP(c, self.dense)

    def inputs(self, embedded: Array, features: Array) -> tuple[Array, Array]:
        """Returns the residual stream [B, N, E], and what attention reads, [B, N, 2 E]."""
        token, feature = self.embedding_norm(embedded), self.feature_norm(features)
        residual = feature if self.config.norm_before_residual else features
        return residual, jnp.concatenate([token.astype(feature.dtype), feature], axis=-1)

    def __call__(
        self,
        embedded: Array,
        features: Array,
        rotations: tuple[Array, Array] | None,
        memory: Memory | None,
        visible: Array | None,
    ) -> tuple[Array, tuple[Array, Array]]:
        residual, both = self.inputs(embedded, features)
        mixed, written = self.attention(both, rotations, memory, visible)
        x = residual + mixed
        return x + self.mlp(self.mlp_norm(x)), written


class Eagle3(nn.Module):
    """The network: from a feature at position t and the token at t + 1 to the token at t + 2.

    `fuse` makes the feature of a token that the target has read.  The feature of a drafted token is
    the head's own state, which `__call__` returns.

    Reference: Li et al. 2025 (EAGLE-3), arXiv 2503.01840, section 3.
    """

    config: Eagle3Config
    dot_general: Callable[..., Array] = dot_general

    def setup(self) -> None:
        c = self.config
        dense = functools.partial(Dense, dot_general=self.dot_general)
        if c.fuses:
            size = c.layers.hidden_size
            self.fc = dense(size, ("features", "embed"), False, c.layers.init_scale)
        if c.norm_before_fc:
            self.input_norm = Norm(c.layers, axis="features")
        if c.fc_norm:
            self.fc_norms = [Norm(c.layers) for _ in range(c.num_taps)]
        others = [Layer(c.layers, i, dense, c.attend) for i in range(1, c.layers.num_layers)]
        self.layers = [FirstLayer(c, dense), *others]
        self.norm = Norm(c.layers)

    def fuse(self, features: Array) -> Array:
        """Fuses the target's hidden states [..., n Et] at the taps into features [..., E]."""
        c = self.config
        if c.norm_before_fc:
            features = self.input_norm(features)
        if c.fc_norm:
            parts = jnp.split(features, c.num_taps, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)]
            features = jnp.concatenate(normed, axis=-1)
        return self.fc(features) if c.fuses else features

    def __call__(
        self,
        embedded: Array,
        features: Array,
        positions: Array,
        cache: KVCache | BranchCache | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array, KVCache | BranchCache | None]:
        """Runs one pass over pairs.

        Args:
          embedded: [B, N, E] embeddings of the tokens.
          features: [B, N, E] of the positions before them.
          positions: [B, N] of the features.
          cache, mask: as in `contract.Model.apply`; both None: causal attention, no cache.

        Returns:
          The features [B, N, E] of the drafted next tokens, the states [B, N, E] that the head's
          matrix takes, and the cache with the pairs staged.
        """
        c = self.config.layers
        form = self._form(features, cache)
        if form is not None:
            x, cache = self._whole_layer(form, embedded, features, positions, cache, mask)
            normed = self.norm(x)
            return normed if self.config.feeds_normed else x, normed, cache
        ropes = {c.rope_of(i) for i in range(c.num_layers)}
        rotations = {
            rope: None if rope is None else rope.rotations(positions, c.head_dim) for rope in ropes
        }
        x, written = features, []
        for i, layer in enumerate(self.layers):
            memory = visible = None
            if cache is not None:
                memory = cache.layer(i)
                visible = memory.visible(positions, mask, c.window_of(i))
            inputs = (embedded, x) if i == 0 else (x,)
            x, part = layer(*inputs, rotations[c.rope_of(i)], memory, visible)
            written.append(part)
        if cache is not None:
            cache = cache.with_layers(written)
        normed = self.norm(x)
        return normed if self.config.feeds_normed else x, normed, cache

    def _form(self, features: Array, cache: KVCache | BranchCache | None) -> LayersForm | None:
        """Returns the form of a head of one layer that a kernel runs as a whole, or None."""
        c = self.config
        if self.is_initializing() or c.layers.num_layers > 1:
            return None
        held = [self.variables["params"]["layers_0"]]
        product, attend = self.dot_general, c.attend
        return form_of_layers(c.layers, product, attend, held, features, cache, normed=False)

    def _whole_layer(
        self,
        form: LayersForm,
        embedded: Array,
        features: Array,
        positions: Array,
        cache: Any,
        mask: Array | None,
    ) -> tuple[Array, KVCache]:
        """Returns the output of the only layer, and the cache with the pairs staged."""
        c, layer = self.config.layers, self.layers[0].clone(parent=None)

        def together(
            params: Weights, embedded: Array, x: Array, positions: Array, cache: Any, mask: Any
        ) -> tuple[Array, KVCache]:
            residual, both = layer.apply({"params": params}, embedded, x, method="inputs")
            streams, staged = run_whole_layers(
                form, c, [params], residual, positions, cache, mask, both
            )
            if x.shape[1] > MOST_TOKENS:
                # Of a prompt only keys and values are needed.  They come from here, so the output
                # of the call above is unused, and XLA leaves that call out.
                _, staged = apart(params, embedded, x, positions, cache, mask)
            return streams[1], staged

        def apart(
            params: Weights, embedded: Array, x: Array, positions: Array, cache: Any, mask: Any
        ) -> tuple[Array, KVCache]:
            rope, memory = c.rope_of(0), cache.layer(0)
            turned = None if rope is None else rope.rotations(positions, c.head_dim)
            visible = memory.visible(positions, mask, c.window_of(0))
            given = embedded, x, turned, memory, visible
            x, written = layer.apply({"params": params}, *given)
            return x, cache.with_layers([written])

        params = self.variables["params"]["layers_0"]
        inputs = embedded, features, positions, cache, mask
        return together_or_apart(together, apart, params, *inputs)

    def everything(self, features: Array, embedded: Array, positions: Array) -> Array:
        """Runs `fuse` and one pass, so that `init` makes every parameter."""
        return self(embedded, self.fuse(features), positions)[1]

    def init_cache(self, batch: int, size: int, dtype: DTypeLike) -> KVCache:
        """Returns an empty cache of `size` slots for each of `batch` rows."""
        c = self.config.layers
        cache = KVCache.zeros(c.num_layers, batch, c.num_kv_heads, size, c.head_dim, dtype)
        by_kernel = self.config.attend is cpu_attend
        return dataclasses.replace(cache, by_kernel=by_kernel, may_have_pages=True)


def eagle3_shapes(config: Eagle3Config) -> Weights:
    """Returns the shape of every parameter of the network; nothing is computed."""
    return nn.meta.unbox(_boxed(config))


def eagle3_axes(config: Eagle3Config) -> Specs:
    """Returns the logical axes of every parameter, for `parallel.named_shardings`."""
    return nn.get_partition_spec(_boxed(config))


def _boxed(config: Eagle3Config) -> Weights:
    size = config.layers.hidden_size
    inputs = (
        jax.ShapeDtypeStruct((1, 1, config.num_taps * config.target_size), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, size), jnp.float32),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
    )
    init = functools.partial(Eagle3(config).init, method="everything")
    return jax.eval_shape(init, jax.random.key(0), *inputs)["params"]


def draft_logits(
    states: Array,
    head: Array | Int8,
    vocab_size: int,
    to_draft: Array | None = None,
    product: Callable[..., Array] = dot_general,
) -> Array:
    """Returns logits on the target's vocabulary, -inf for tokens that a drafter never proposes.

    Args:
      states: [..., E].
      head: [E, Vd].
      vocab_size: V of the target.
      to_draft: [V] the row of the head for each of the target's tokens, or a negative number where
        there is none; None: equal ids mean equal tokens, and the padded sizes may differ.
      product: as `dot_general` in `Transformer`.

    Returns:
      [..., V] float32.
    """
    dimensions = (((states.ndim - 1,), (0,)), ((), ()))
    if isinstance(head, Int8):
        logits = int8_form(product)(states, head.unbox(), dimensions)
    else:
        logits = product(states, head.astype(states.dtype), dimensions)
    return on_target(logits.astype(jnp.float32), vocab_size, to_draft)
