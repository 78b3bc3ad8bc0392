"""The network of multi-token prediction: a decoder layer over a hidden state and an embedding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.typing import DTypeLike

from specjax.caches import KVCache
from specjax.models import (
    Dense,
    Layer,
    Norm,
    Transformer,
    TransformerConfig,
    attend,
    dot_general,
    run_layers,
)
from specjax.parallel import Specs
from specjax.types import Weights


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """The sizes of the network, and the switches in which published layers differ."""

    layers: TransformerConfig  # of the decoder layer; its vocabulary is the target's
    hidden_first: bool = False  # the projection reads [hidden state, embedding]
    has_norm: bool = True  # the output is normed before the head
    # What a draft's pair gets as its hidden state: the output after that norm, as in transformers,
    # SGLang and all of Qwen's code; or before it, as vLLM does for DeepSeek, GLM and ERNIE.
    feeds_normed: bool = True
    # vLLM reads zeros in place of the embedding of the token at position 1 for DeepSeek, GLM, MiMo
    # and ERNIE; transformers does not, and no report of training mentions it.
    zeroes_first: bool = False
    dot_general: Callable[..., Array] = dot_general  # as in `Transformer`
    attend: Callable[..., Array] = attend

    num_taps = 1

    def network(self, dot_general: Callable[..., Array] | None = None) -> Mtp:
        """Returns the network of this configuration, which may multiply in another way."""
        return Mtp(
            self if dot_general is None else dataclasses.replace(self, dot_general=dot_general)
        )

    def axes(self) -> Specs:
        """Returns the logical axes of every parameter, for `parallel.named_shardings`."""
        return nn.get_partition_spec(_boxed(self))


class Mtp(nn.Module):
    """The network: from a hidden state at position t and the token at t + 1 to the token at t + 2.

        h' = layer(W [norm_e(E[x]) ; norm_h(h)]),    logits = head(norm(h'))

    The hidden state of a token that the target has read is the target's last one, after its final
    norm.  That of a drafted token is the network's own output, so one layer drafts any depth.

    Reference: DeepSeek-AI 2024 (DeepSeek V3), arXiv 2412.19437, equations 21 to 23.
    """

    config: MtpConfig

    def setup(self) -> None:
        c = self.config.layers
        dense = functools.partial(Dense, dot_general=self.config.dot_general)
        self.embedding_norm, self.hidden_norm = Norm(c), Norm(c)
        self.project = dense(c.hidden_size, ("features", "embed"), False, c.init_scale)
        self.layers = [Layer(c, i, dense, self.config.attend) for i in range(c.num_layers)]
        if self.config.has_norm:
            self.norm = Norm(c)

    def fuse(self, features: Array) -> Array:
        """Returns the hidden states [..., E] of the target, which the network reads unchanged."""
        return features

    def __call__(
        self,
        embedded: Array,
        features: Array,
        positions: Array,
        cache: KVCache | None = None,
        mask: Array | None = None,
    ) -> tuple[Array, Array, KVCache | None]:
        """Runs one pass over pairs; arguments and results are those of `Eagle3.__call__`."""
        own, c = self.config, self.config.layers
        if own.zeroes_first:
            embedded = jnp.where(positions[..., None] == 0, 0, embedded)
        parts = [self.embedding_norm(embedded).astype(features.dtype), self.hidden_norm(features)]
        x = self.project(jnp.concatenate(parts[::-1] if own.hidden_first else parts, axis=-1))
        streams, staged = run_layers(c, self.layers, x, positions, cache, mask)
        normed = self.norm(streams[-1]) if own.has_norm else streams[-1]
        fed = normed if own.feeds_normed else streams[-1]
        if c.logit_scale != 1.0:
            normed = normed * jnp.asarray(c.logit_scale, normed.dtype)
        return fed, normed, cast(KVCache | None, staged)

    def init_cache(self, batch: int, size: int, dtype: DTypeLike) -> KVCache:
        """Returns an empty cache of `size` slots for each of `batch` rows."""
        whole = Transformer(self.config.layers, attend=self.config.attend, parent=None)
        return cast(KVCache, whole.init_cache(batch, size, dtype))


def mtp_shapes(config: MtpConfig) -> Weights:
    """Returns the shape of every parameter of the network; nothing is computed."""
    return nn.meta.unbox(_boxed(config))


def _boxed(config: MtpConfig) -> Weights:
    pair = jax.ShapeDtypeStruct((1, 1, config.layers.hidden_size), jnp.float32)
    inputs = pair, pair, jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Mtp(config).init, jax.random.key(0), *inputs)["params"]
