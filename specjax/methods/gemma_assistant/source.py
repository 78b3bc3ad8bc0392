"""`AssistantSource`: Gemma 4's assistants, which read the target's cache."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, NotRequired, cast

import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from specjax.caches import KVCache
from specjax.contract import Context, Lookahead, Source
from specjax.methods.eagle3 import draft_logits, parents_of
from specjax.methods.gemma_assistant.network import (
    Assistant,
    AssistantConfig,
    Memories,
    assistant_axes,
    cluster_logits,
)
from specjax.methods.published import PublishedSource, SharedParams, embedding_of
from specjax.models import Tables, TransformerConfig, look_up
from specjax.parallel import Specs
from specjax.types import Block, Proposal, Weights


@struct.dataclass
class AssistantState:
    hidden: Array  # [B, Et] the target's last hidden state at the last token that it has read
    known: Array  # [B] bool: whether there is such a token


class AssistantOwn(Tables):
    """The parameters of an assistant."""

    network: Weights
    table: Array  # [V, E] its own table, which is its head
    order: NotRequired[Array]  # [V] the tokens by cluster


AssistantParams = SharedParams[AssistantOwn]


class AssistantReading(NamedTuple):
    memories: Memories
    visible: tuple[Array, ...]  # [B, 1, S] each
    position: Array  # [B, 1]
    root: Array  # [B, Et] the hidden state below the token that was read last
    nodes: Array  # [B, T, Et] those below the nodes of a tree that were read so far
    readable: Array  # [B] bool


@dataclasses.dataclass(frozen=True)
class AssistantSource(PublishedSource, Source[AssistantParams, AssistantState, AssistantReading]):
    """Drafts from the pending token, the target's hidden state before it, and the target's cache.

    It reads nothing but what the target has computed, so a draft that is rejected leaves nothing
    behind.  All drafts have the position of the pending token, and a token of a sliding layer
    attends to the last `window` tokens that the target has read.

    A row without any token in the cache, whose text is a single token, has no drafts.

    Reference: `gemma4_assistant` in transformers 5 (there is no paper).
    """

    network: AssistantConfig
    vocab_size: int  # the target's
    leaves: tuple[int, int]  # of the target's cache: its last sliding layer, and its last full one
    taps: tuple[int, ...]  # the last of the target's

    @property
    def layers(self) -> TransformerConfig:
        return self.network.layers

    def axes(self) -> Specs:
        return {
            "network": assistant_axes(self.network),
            "table": PartitionSpec("vocab", "embed"),
        }

    def init(
        self, params: AssistantParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> AssistantState:
        del params, capacity, lookahead
        features = _features(prompt)
        rows = len(prompt.count)
        hidden = jnp.zeros((rows, features.shape[-1]), features.dtype)
        return AssistantState(hidden, jnp.zeros(rows, bool))

    def observe(
        self, params: AssistantParams, state: AssistantState, block: Block
    ) -> AssistantState:
        del params
        features, some = _features(block), block.count > 0
        at = jnp.maximum(block.count - 1, 0)[:, None, None]
        last = jnp.take_along_axis(features, at, axis=1)[:, 0]
        hidden = jnp.where(some[:, None], last, state.hidden)
        return AssistantState(hidden, state.known | some)

    def truncate(
        self, state: AssistantState, count: Array, last: Array | None
    ) -> AssistantState | None:
        assert last is not None  # the source has taps
        known = jnp.broadcast_to(count > 0, state.known.shape)
        return AssistantState(last.astype(state.hidden.dtype), known)

    def begin(
        self, params: AssistantParams, state: AssistantState, context: Context
    ) -> tuple[AssistantState, AssistantReading, Array]:
        # Nothing is staged, and a kernel's form of the cache is for the target's own pass.
        cache = dataclasses.replace(cast(KVCache, context.cache), by_kernel=False)
        before = jnp.maximum(cache.length - 1, 0)[:, None]
        nothing = jnp.zeros((1, 1, 1), bool)
        memories, visible = [], []
        for owner, leaf in enumerate(self.leaves):
            memory = cache.layer(leaf)
            memories.append(memory.whole())
            visible.append(memory.visible(before, nothing, self.layers.window_of(owner)))
        reading = AssistantReading(
            memories,
            tuple(visible),
            cache.length[:, None],
            state.hidden,
            state.hidden[:, None][:, :0],
            state.known,
        )
        after, logits = self._read(params, reading, context.pending[:, None], state.hidden[:, None])
        return state, reading._replace(root=after[:, 0]), logits[:, 0]

    def extend(
        self, params: AssistantParams, reading: AssistantReading, tokens: Array
    ) -> tuple[AssistantReading, Array]:
        after, logits = self._read(params, reading, tokens[:, None], reading.root[:, None])
        return reading._replace(root=after[:, 0]), logits[:, 0]

    def read_tree(
        self,
        params: AssistantParams,
        reading: AssistantReading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[AssistantReading, Array]:
        hidden = parents_of(reading.root, reading.nodes, depth, mask)
        # Nodes do not attend to each other, so only the newest ones are read.
        after, logits = self._read(
            params, reading, jnp.take_along_axis(tokens, at, axis=1), _at(hidden, at)
        )
        rows = jnp.arange(len(tokens))[:, None]
        nodes = jnp.zeros_like(hidden).at[:, : reading.nodes.shape[1]].set(reading.nodes)
        return reading._replace(nodes=nodes.at[rows, at].set(after)), logits

    def known(self, params: AssistantParams, reading: AssistantReading, tokens: Array) -> Array:
        """Returns [B, N] bool: False for the pending token of a row without any token before it."""
        return jnp.ones(tokens.shape, bool).at[:, 0].set(reading.readable)

    def end(
        self,
        params: AssistantParams,
        state: AssistantState,
        reading: AssistantReading,
        proposal: Proposal,
    ) -> AssistantState:
        return state

    def _read(
        self, params: AssistantParams, reading: AssistantReading, tokens: Array, hidden: Array
    ) -> tuple[Array, Array]:
        """Returns the hidden states [B, N, Et] below tokens [B, N], and the logits after them."""
        embedded = look_up(embedding_of(params), tokens)
        wide = [jnp.broadcast_to(seen, (*tokens.shape, seen.shape[-1])) for seen in reading.visible]
        positions = jnp.broadcast_to(reading.position, tokens.shape)
        out = Assistant(self.network).apply(
            {"params": params.own["network"]}, embedded, hidden, positions, reading.memories, wide
        )
        after, states, scores = cast(tuple[Array, Array, Array], out)
        after = after.astype(hidden.dtype)
        if self.network.num_clusters is None:
            return after, draft_logits(states, params.own["table"].T, self.vocab_size)
        assert "order" in params.own  # a head by clusters has it
        table, order = params.own["table"], params.own["order"]
        logits = cluster_logits(states, scores, table, order, self.network.clusters_read)
        return after, logits


def _features(block: Block) -> Array:
    assert block.features is not None  # the source has taps
    return block.features


def _at(x: Array, index: Array) -> Array:
    """Gathers x [B, N, E] at the indices [B, M]: [B, M, E]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)
