"""The network of Gemma 4's assistants, whose layers read the target's keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from specjax.models import (
    Dense,
    Layer,
    Norm,
    TransformerConfig,
    look_up,
)
from specjax.parallel import Specs
from specjax.types import Weights

Memories = Sequence[tuple[Array, Array]]
"""Keys and values [B, K, S, D]: those of the target's last sliding layer, and of its last full one.
"""

OWNERS = 2
"""Layers of `AssistantConfig.layers` that stand for these two layers of the target."""


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
    """The sizes of an assistant."""

    # Of the layers; the first two are those of the target whose keys and values the others read.
    layers: TransformerConfig
    target_size: int  # hidden size of the target
    embedding_scale: float  # of the target's embeddings
    num_clusters: int | None = None  # of its head; None: the head has every token's logit
    clusters_read: int = 32  # those with the highest scores, whose tokens have logits


class Assistant(nn.Module):
    """The network: from a token and a hidden state to logits and the next hidden state.

        x = W_pre [s E[token] ; h],    x = layers(x),    logits = head(norm(x)),
        next h = W_post norm(x)

    Its position is that of the pending token for all drafts, and it keeps no keys and values.  The
    formulas are those of the published code: `gemma4_assistant` in transformers.
    """

    config: AssistantConfig

    @nn.compact
    def __call__(
        self,
        embedded: Array,
        hidden: Array,
        positions: Array,
        memories: Memories,
        visible: Sequence[Array],
    ) -> tuple[Array, Array, Array]:
        """Runs one pass over tokens of which none attends to another.

        Args:
          embedded: [B, N, Et] of the tokens, from the target's table.
          hidden: [B, N, Et] of the tokens before them.
          positions: [B, N], of the pending token.
          memories: as above.
          visible: [B, N, S] bool for each of the two, the slots that a token attends to.

        Returns:
          The hidden states [B, N, Et] for the next tokens, the states [B, N, E] that the head
          takes, and the scores [B, N, C] of the clusters of the head (C is 0 without any).
        """
        own, c = self.config, self.config.layers
        dense = Dense
        scaled = embedded * jnp.asarray(own.embedding_scale, embedded.dtype)
        both = jnp.concatenate([scaled, hidden.astype(scaled.dtype)], axis=-1)
        x = dense(c.hidden_size, ("features", "embed"), name="pre_projection")(both)
        for i in range(OWNERS, c.num_layers):
            rope, which = c.rope_of(i), c.owner_of(i)
            turned = None if rope is None else rope.rotations(positions, c.rotated_of(i))
            layer = Layer(c, i, dense, name=f"layer_{i - OWNERS}")
            x, _ = layer(x, turned, memories[which], visible[which])
        x = Norm(c, name="norm")(x)
        after = dense(own.target_size, ("embed", "features"), name="post_projection")(x)
        scores = x[..., :0]
        if own.num_clusters is not None:
            scores = dense(own.num_clusters, ("embed", "clusters"), name="centroids")(x)
        return after, x, scores


def assistant_axes(config: AssistantConfig) -> Specs:
    """Returns the logical axes of every parameter, for `parallel.named_shardings`."""
    return nn.get_partition_spec(_boxed(config))


def assistant_shapes(config: AssistantConfig) -> Weights:
    """Returns the shape of every parameter of the network; nothing is computed."""
    return nn.meta.unbox(_boxed(config))


def _boxed(config: AssistantConfig) -> Weights:
    c = config.layers
    pair = jax.ShapeDtypeStruct((1, 1, config.target_size), jnp.float32)
    memories, visible = [], []
    for layer in range(OWNERS):
        sizes = c.slots_of(layer)
        assert sizes is not None
        heads, dim, _ = sizes
        memories.append((jax.ShapeDtypeStruct((1, heads, 1, dim), jnp.float32),) * 2)
        visible.append(jax.ShapeDtypeStruct((1, 1, 1), bool))
    positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = Assistant(config).init
    return jax.eval_shape(init, jax.random.key(0), pair, pair, positions, memories, visible)[
        "params"
    ]


def cluster_logits(states: Array, scores: Array, table: Array, order: Array, count: int) -> Array:
    """Returns logits of the tokens in the best clusters, and -inf for all others.

    Few rows of the table are read: those of `count` clusters for each state.

    Args:
      states: [B, N, E].
      scores: [B, N, C] of the clusters.
      table: [V, E], a row for each token.
      order: [V] the tokens, cluster after cluster, V / C in each.
      count: the clusters of each state that are read.

    Returns:
      [B, N, V] float32.
    """
    clusters = order.reshape(scores.shape[-1], -1)
    best = jax.lax.top_k(scores.astype(jnp.float32), count)[1]
    tokens = clusters[best].reshape(*states.shape[:2], -1)
    rows = look_up(table, tokens).astype(states.dtype)
    found = jnp.einsum("bne,bnte->bnt", states, rows).astype(jnp.float32)
    batch, width = states.shape[:2]
    out = jnp.full((batch, width, len(table)), -jnp.inf)
    rows_at = jnp.arange(batch)[:, None, None], jnp.arange(width)[None, :, None]
    return out.at[(*rows_at, tokens)].set(found)
