"""Sources that read pairs of the target's hidden states and the tokens after them; EAGLE-3 is one.

`PairSource` is the loop that EAGLE-3 shares with multi-token prediction, which has another network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NotRequired, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from specjax.caches import KVCache, in_chunks, places
from specjax.contract import Context, Lookahead, Source
from specjax.methods.eagle3.network import Eagle3Config, draft_logits
from specjax.methods.published import PublishedSource, SharedParams, by_row, embedding_of, head_of
from specjax.models import Tables, TransformerConfig, look_up
from specjax.parallel import Specs
from specjax.proposers import remember, then_pending
from specjax.types import Block, Proposal, Weights


class PairNetwork(Protocol):
    """The configuration of a network of pairs: hashable, and equal if the networks are."""

    @property
    def layers(self) -> TransformerConfig:
        """The configuration of the layers."""
        ...

    @property
    def num_taps(self) -> int:
        """The number of the target's layers that make a feature."""
        ...

    @property
    def dot_general(self) -> Callable[..., Array]:
        """Multiplies with weights where it drafts, as in `Transformer`."""
        ...

    def network(self, dot_general: Callable[..., Array] | None = None) -> Any:
        """Returns the Linen module, with the methods of `network.Eagle3`.

        `dot_general` multiplies with weights, by default that of this configuration.
        """
        ...

    def axes(self) -> Specs:
        """Returns the logical axes of the network's parameters."""
        ...


NetworkT = TypeVar("NetworkT", bound=PairNetwork)


@struct.dataclass
class Eagle3State:
    cache: KVCache  # of the head; slot t holds the pair of the feature at t and the token at t + 1
    fresh: Array  # [B, depth + 1] committed tokens whose features the head has not read
    features: Array  # [B, depth + 1, sum E] those features, as the target gave them
    count: Array  # [B] the number of those tokens


class EagleOwn(Tables):
    """The parameters of an EAGLE-3 head."""

    network: Weights
    mask_hidden: Array  # of P-EAGLE: the learned feature of a mask
    to_draft: NotRequired[Array]  # [V] the head's row of each token, or a negative number


EagleParams = SharedParams[EagleOwn]


class PairReading(NamedTuple):
    cache: KVCache
    root: Array  # [B, E] the feature of the token that was read last
    nodes: Array  # [B, T, E] the features of the nodes of a tree that were read so far
    readable: Array  # [B] bool: has the head read any pair?


class EagleSource(PublishedSource, Generic[NetworkT]):
    """The base class of sources whose network reads pairs of a feature and a token."""

    network: NetworkT
    taps: tuple[int, ...]

    takes_int8_head = True
    waits = True

    def __post_init__(self) -> None:
        if len(self.taps) != self.network.num_taps:
            raise ValueError(
                f"taps={self.taps}, and the head fuses the outputs of {self.network.num_taps} "
                "layers: name as many"
            )

    @property
    def layers(self) -> TransformerConfig:
        return self.network.layers

    def axes(self) -> Specs:
        return {"network": self.network.axes()}

    def empty(self, prompt: Block, width: int, slots: int) -> Eagle3State:
        """Returns the state before any token.

        Args:
          prompt: with the shapes of the features.
          width: the most tokens that a step commits.
          slots: of the cache.
        """
        rows, features = len(prompt.count), features_of(prompt)
        return Eagle3State(
            self.network.network().init_cache(rows, slots, features.dtype),
            fresh=jnp.zeros((rows, width), jnp.int32),
            features=jnp.zeros((rows, width, features.shape[-1]), features.dtype),
            count=jnp.zeros(rows, jnp.int32),
        )

    def read(self, params: EagleParams, state: Eagle3State, block: Block) -> Eagle3State:
        return read_block(self.network, params, state, block)

    def truncate(self, state: Eagle3State, count: Array, last: Array | None) -> Eagle3State | None:
        cache = state.cache.truncate(jnp.maximum(count - 1, 0))
        if cache is None:
            return None
        assert last is not None  # the source has taps
        return Eagle3State(
            cache,
            fresh=jnp.zeros_like(state.fresh),
            features=state.features.at[:, 0].set(last.astype(state.features.dtype)),
            count=jnp.minimum(jnp.broadcast_to(count, state.count.shape), 1),
        )

    def catch_up(self, params: EagleParams, state: Eagle3State) -> Eagle3State:
        # The pair of the last feature waits for its token.
        pairs = jnp.maximum(state.count - 1, 0)
        features = fuse(self.network, params, state.cache, state.features)
        tokens = jnp.roll(state.fresh, -1, axis=1)
        cache = read_pairs(self.network, params, state.cache, tokens, features)[-1].commit(pairs)
        last = at_index(state.features, pairs[:, None])[:, 0]
        return dataclasses.replace(
            state,
            cache=cache,
            features=state.features.at[:, 0].set(last),
            count=jnp.minimum(state.count, 1),
        )

    def observe(self, params: EagleParams, state: Eagle3State, block: Block) -> Eagle3State:
        fresh, count = remember(state.fresh, block)
        width = min(fresh.shape[1], block.tokens.shape[1])
        features = state.features.at[:, :width].set(features_of(block)[:, :width])
        return dataclasses.replace(state, fresh=fresh, features=features, count=count)


class PairSource(EagleSource[NetworkT]):
    """Reads pairs of a feature and the token after it, and predicts the token after that.

    It has the methods of `Source`; a concrete source inherits from both.

        text        a   b   c   d|  e   f        d is pending; e and f are drafts
        features    a'  b'  c' |d*  e*           ' fused from the target's layers, * the head's own
        pairs      a'b b'c c'd |d*e e*f          position of a pair: that of its feature

    Once drafts are accepted, their features come from the target, and `begin` reads their pairs
    again.  So the cache holds only pairs with the target's features.

    A row without any feature, whose text is a single token, has no drafts.
    """

    def init(
        self, params: EagleParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> Eagle3State:
        width = lookahead.depth + 1
        return self.empty(prompt, width, capacity + width + lookahead.staged)

    def begin(
        self, params: EagleParams, state: Eagle3State, context: Context
    ) -> tuple[Eagle3State, PairReading, Array]:
        tokens = then_pending(state.fresh, state.count, context.pending)[:, 1:]
        features = fuse(self.network, params, state.cache, state.features)
        fed, normed, cache = read_pairs(self.network, params, state.cache, tokens, features)
        last = jnp.maximum(state.count - 1, 0)[:, None]
        cache = cache.commit(state.count)
        caught_up = dataclasses.replace(state, cache=cache, count=jnp.zeros_like(state.count))
        reading = PairReading(cache, at_index(fed, last)[:, 0], fed[:, :0], cache.length > 0)
        return caught_up, reading, self._logits(params, at_index(normed, last))[:, 0]

    def extend(
        self, params: EagleParams, reading: PairReading, tokens: Array
    ) -> tuple[PairReading, Array]:
        pair = tokens[:, None], reading.root[:, None]
        fed, normed, cache = read_pairs(self.network, params, reading.cache, *pair)
        reading = reading._replace(cache=cache.commit(jnp.ones_like(tokens)), root=fed[:, 0])
        return reading, self._logits(params, normed)[:, 0]

    def read_tree(
        self,
        params: EagleParams,
        reading: PairReading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[PairReading, Array]:
        features = parents_of(reading.root, reading.nodes, depth, mask)
        fed, normed, cache = read_pairs(
            self.network, params, reading.cache, tokens, features, depth, mask
        )
        return reading._replace(cache=cache, nodes=fed), self._logits(params, at_index(normed, at))

    def known(self, params: EagleParams, reading: PairReading, tokens: Array) -> Array:
        """Returns [B, N] bool: False for the pending token of a row without any feature."""
        return jnp.ones(tokens.shape, bool).at[:, 0].set(reading.readable)

    def end(
        self,
        params: EagleParams,
        state: Eagle3State,
        reading: PairReading,
        proposal: Proposal,
    ) -> Eagle3State:
        return dataclasses.replace(state, cache=reading.cache.rewind(state.cache))

    def _logits(self, params: EagleParams, normed: Array) -> Array:
        return logits_of(params, normed, self.vocab_size, self.network.dot_general)


@dataclasses.dataclass(frozen=True)
class Eagle3Source(PairSource[Eagle3Config], Source[EagleParams, Eagle3State, PairReading]):
    """An EAGLE-3 head: `PairSource` with a network over several layers of the target.

    Reference: Li et al. 2025 (EAGLE-3), arXiv 2503.01840, section 3.
    """

    network: Eagle3Config
    vocab_size: int  # the target's
    taps: tuple[int, ...] = (2,)


def read_block(
    network: PairNetwork, params: EagleParams, state: Eagle3State, block: Block
) -> Eagle3State:
    """Returns the state after more of a prompt: all its pairs read, except that of the next token.

        read before    a   b|             b* is the feature of b, which waits for its token
        block           c   d   .         2 tokens count
        pairs           b*c c*d           and d* waits

    A row that has read nothing has no feature, so the first token of its text is in no pair.
    """
    features = features_of(block)
    tokens, raw, total = paired(
        state.features[:, 0], state.count > 0, block.tokens, features, block.count
    )

    def read(
        cache: KVCache, start: Array | int, pairs: tuple[Array, Array]
    ) -> tuple[KVCache, tuple[()]]:
        tokens, raw = pairs
        count = jnp.clip(total - start, 0, tokens.shape[1])
        features, depth = fuse(network, params, cache, raw), places(tokens.shape[1], count)
        return read_pairs(network, params, cache, tokens, features, depth)[-1].commit(count), ()

    last = at_index(features, jnp.maximum(block.count - 1, 0)[:, None])[:, 0]
    first = jnp.where((block.count > 0)[:, None], last, state.features[:, 0])
    return Eagle3State(
        in_chunks(read, state.cache, (tokens, raw))[0],
        fresh=jnp.zeros_like(state.fresh),  # the token before the pending one is read
        features=state.features.at[:, 0].set(first),
        count=jnp.minimum(state.count + block.count, 1),
    )


def paired(
    waiting: Array, waits: Array, tokens: Array, features: Array, count: Array
) -> tuple[Array, Array, Array]:
    """Returns the tokens [B, W] and features [B, W, E] of the pairs of a block, and their number.

    Each token is in a pair with the feature before it.

    Args:
      waiting: [B, E] the feature before the first token.
      waits: [B] bool, whether there is one; else the first token is in no pair.
      tokens, features: [B, W] and [B, W, E] of the block.
      count: [B] the tokens that count.
    """
    start, width = 1 - waits.astype(jnp.int32), tokens.shape[1]
    before = jnp.concatenate([waiting[:, None], features[:, :-1]], axis=1)

    def shifted(x: Array) -> Array:
        """Returns [B, W, ...] from this index on; entries after the end are not used."""
        padded = jnp.pad(x, ((0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)))
        cut = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))
        return cut(padded, start)

    return shifted(tokens), shifted(before), jnp.maximum(count - start, 0)


def fuse(network: PairNetwork, params: EagleParams, cache: KVCache, features: Array) -> Array:
    """Fuses [B, T, sum E] of the target into [B, T, E] of the head that `cache` belongs to."""
    own, features = {"params": params.own["network"]}, by_row(features, cache)
    return cast(Array, network.network().apply(own, features, method="fuse"))


def read_pairs(
    network: PairNetwork,
    params: EagleParams,
    cache: KVCache,
    tokens: Array,
    features: Array,
    depth: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array, KVCache]:
    """Stages pairs of tokens [B, T] and features [B, T, E]; returns as `Eagle3.__call__`.

    Without `depth` [T], or [B, T] by row, and `mask` the pairs are consecutive.
    """
    positions = cache.length[:, None] + (jnp.arange(tokens.shape[1]) if depth is None else depth)
    embedded = look_up(embedding_of(params), tokens)
    out = network.network().apply(
        {"params": params.own["network"]}, embedded, features, positions, cache, mask
    )
    return cast(tuple[Array, Array, KVCache], out)


def parents_of(root: Array, nodes: Array, depth: Array, mask: Array) -> Array:
    """Returns the states [B, T, E] of the parents of a tree's nodes, which earlier calls have read.

    Args:
      root: [B, E], the state of the pending token, the parent of the first level.
      nodes: [B, < T, E] those of the nodes that were read.
      depth, mask: as for `Source.read_tree`.
    """
    is_parent = mask & (depth == depth[:, None] - 1)
    above = jnp.where(is_parent.any(-1), 1 + jnp.argmax(is_parent, axis=-1), 0)
    known = jnp.concatenate([root[:, None], nodes], axis=1)
    return at_index(known, jnp.broadcast_to(above, (len(root), len(depth))))


def logits_of(
    params: EagleParams, normed: Array, vocab_size: int, product: Callable[..., Array]
) -> Array:
    """Maps states [..., E] after the final norm to float32 logits [..., V] of the target."""
    to_draft = params.own.get("to_draft")
    return draft_logits(normed, head_of(params), vocab_size, to_draft, product)


def features_of(block: Block) -> Array:
    """Returns the features of a block, which exist since its proposer has taps."""
    assert block.features is not None
    return block.features


def at_index(x: Array, index: Array) -> Array:
    """Gathers x [B, N, E] at the indices [B, M]: [B, M, E]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)
