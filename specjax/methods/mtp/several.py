"""`MtpLayersSource`: several layers of multi-token prediction (MTP), one for each depth.

    text        x0  x1  x2  x3|  d1  d2           x3 is pending; d1 and d2 are drafts
    layer 0     h0x1 h1x2 h2x3                    predicts x2, x3, d1 from the target's states h
    layer 1         a0x2 a1x3 a2d1                predicts x3, d1, d2 from the outputs a of layer 0
    layer 2             b0x3 b1d1 b2d2            predicts d1, d2, d3 from the outputs b of layer 1

Layer k reads the output of layer k - 1 and the token that is k + 1 after it.  So its committed
pairs end k tokens before those of layer 0, and a step in which fewer drafts than layers were
accepted is no special case: each layer has a cache of its own, whose length says what it has read.
Drafts deeper than the layers come from the last layer, which then reads its own outputs.

Reference: DeepSeek-AI 2024 (DeepSeek V3), arXiv 2412.19437, equations 21 to 24.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from specjax._internal.checks import within
from specjax.caches import KVCache, in_chunks, stage
from specjax.contract import Context, Lookahead, Source
from specjax.methods.eagle3 import (
    EagleOwn,
    EagleParams,
    at_index,
    paired,
    parents_of,
    read_pairs,
)
from specjax.methods.mtp.network import MtpConfig
from specjax.methods.mtp.source import head_logits
from specjax.methods.published import PublishedSource, by_row
from specjax.models import TransformerConfig
from specjax.parallel import Specs
from specjax.proposers import remember, then_pending
from specjax.types import Block, Proposal


def part_name(k: int) -> str:
    """Returns the name of the parameters of layer k."""
    return f"depth_{k}"


@struct.dataclass
class LayersState:
    caches: tuple[KVCache, ...]  # by layer; slot p holds the pair of the output at position p
    # By layer, without the last: [B, 1, S, E] its outputs at the slots of its cache.
    outputs: tuple[Array, ...]
    fresh: Array  # [B, depth + 1] committed tokens whose features layer 0 has not read
    features: Array  # [B, depth + 1, E] those features, as the target gave them
    count: Array  # [B] the number of those tokens


class LayersReading(NamedTuple):
    caches: tuple[KVCache, ...]
    outputs: tuple[Array, ...]
    own: Array  # [B, E] the last output of the last layer
    nodes: Array  # [B, T, E] its outputs at the nodes of a tree that were read so far
    depth: Array  # [] the drafts of a chain that were read
    readable: Array  # [B] bool: has layer 0 read any pair?


@dataclasses.dataclass(frozen=True)
class MtpLayersSource(PublishedSource, Source[EagleParams, LayersState, LayersReading]):
    """Several MTP layers of one form: layer k drafts depth k + 1, and the last one all below.

    `head_tokens` is as in `MtpSource`.
    """

    network: MtpConfig  # of each layer
    vocab_size: int  # the target's
    taps: tuple[int, ...]  # the last of the target's
    num_layers: int = 2
    head_tokens: int | None = None  # None: all tokens

    takes_int8_head = True
    waits = True

    def __post_init__(self) -> None:
        if len(self.taps) != 1:
            raise ValueError(f"taps={self.taps}; MTP layers read the target's last state: name it")
        within("num_layers", self.num_layers, 2, 64)
        if self.head_tokens is not None:
            within("head_tokens", self.head_tokens, 1, self.vocab_size, ", the target's tokens")

    @property
    def layers(self) -> TransformerConfig:
        return self.network.layers

    def axes(self) -> Specs:
        return {"network": {part_name(k): self.network.axes() for k in range(self.num_layers)}}

    def init(
        self, params: EagleParams, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> LayersState:
        assert prompt.features is not None  # the source has taps
        rows, size = prompt.features.shape[0], prompt.features.shape[-1]
        width, kind = lookahead.depth + 1, prompt.features.dtype
        caches = tuple(
            self.network.network().init_cache(rows, capacity + width + lookahead.staged, kind)
            for _ in range(self.num_layers)
        )
        shape = (rows, 1, caches[0].capacity, self.layers.hidden_size)
        return LayersState(
            caches,
            tuple(jnp.zeros(shape, kind) for _ in caches[1:]),
            fresh=jnp.zeros((rows, width), jnp.int32),
            features=jnp.zeros((rows, width, size), kind),
            count=jnp.zeros(rows, jnp.int32),
        )

    def read(self, params: EagleParams, state: LayersState, block: Block) -> LayersState:
        assert block.features is not None
        features, waits = block.features, state.count > 0
        pairs = paired(state.features[:, 0], waits, block.tokens, features, block.count)
        caches, outputs, _, _ = self._committed(params, state, *pairs)
        last = at_index(features, jnp.maximum(block.count - 1, 0)[:, None])[:, 0]
        first = jnp.where((block.count > 0)[:, None], last, state.features[:, 0])
        return LayersState(
            caches,
            outputs,
            fresh=jnp.zeros_like(state.fresh),
            features=state.features.at[:, 0].set(first),
            count=jnp.minimum(state.count + block.count, 1),
        )

    def catch_up(self, params: EagleParams, state: LayersState) -> LayersState:
        # The pair of the last feature waits for its token.
        pairs, tokens = jnp.maximum(state.count - 1, 0), jnp.roll(state.fresh, -1, axis=1)
        caches, outputs, _, _ = self._committed(params, state, tokens, state.features, pairs)
        last = at_index(state.features, pairs[:, None])[:, 0]
        return dataclasses.replace(
            state,
            caches=caches,
            outputs=outputs,
            features=state.features.at[:, 0].set(last),
            count=jnp.minimum(state.count, 1),
        )

    def observe(self, params: EagleParams, state: LayersState, block: Block) -> LayersState:
        assert block.features is not None
        fresh, count = remember(state.fresh, block)
        width = min(fresh.shape[1], block.tokens.shape[1])
        features = state.features.at[:, :width].set(block.features[:, :width])
        return dataclasses.replace(state, fresh=fresh, features=features, count=count)

    def truncate(self, state: LayersState, count: Array, last: Array | None) -> LayersState | None:
        caches = [
            cache.truncate(jnp.maximum(count - 1 - k, 0)) for k, cache in enumerate(state.caches)
        ]
        kept = tuple(cache for cache in caches if cache is not None)
        if len(kept) < len(caches):
            return None
        assert last is not None  # the source has taps
        return LayersState(
            kept,
            state.outputs,
            fresh=jnp.zeros_like(state.fresh),
            features=state.features.at[:, 0].set(last.astype(state.features.dtype)),
            count=jnp.minimum(jnp.broadcast_to(count, state.count.shape), 1),
        )

    def begin(
        self, params: EagleParams, state: LayersState, context: Context
    ) -> tuple[LayersState, LayersReading, Array]:
        tokens = then_pending(state.fresh, state.count, context.pending)[:, 1:]
        caches, outputs, fed, normed = self._committed(
            params, state, tokens, state.features, state.count
        )
        caught_up = dataclasses.replace(
            state, caches=caches, outputs=outputs, count=jnp.zeros_like(state.count)
        )
        reading = LayersReading(
            caches,
            outputs,
            jnp.zeros_like(fed[:, 0]),
            fed[:, :0],
            jnp.zeros((), jnp.int32),
            caches[0].length > 0,
        )
        last = jnp.maximum(state.count - 1, 0)[:, None]
        return caught_up, reading, self._logits(params, at_index(normed, last))[:, 0]

    def extend(
        self, params: EagleParams, reading: LayersReading, tokens: Array
    ) -> tuple[LayersReading, Array]:
        depth, last = reading.depth + 1, self.num_layers - 1
        caches, outputs = list(reading.caches), list(reading.outputs)
        waiting = self._waiting(reading.caches, reading.outputs)
        known = [cache.length > 0 for cache in reading.caches]
        drafted = own = jnp.zeros_like(reading.own)
        for k in range(1, self.num_layers):
            feature = waiting[k - 1]
            if k == last:
                feature = jnp.where(depth > last, reading.own, feature)
                caches[k], own, normed = self._one(params, k, caches[k], tokens, feature, known[-2])
            else:
                # Layers of lesser depths have read all that they can, and are left out.
                # This is a loop of at most one turn, since XLA copies a cache that a branch
                # returns.
                def turn(carry: _Carry, k: int = k, feature: Array = feature) -> _Carry:
                    _, cache, kept, _, _ = carry
                    before = cache
                    cache, fed, normed = self._one(params, k, cache, tokens, feature, known[k - 1])
                    kept = _kept(before, kept, fed[:, None])
                    return jnp.bool_(False), cache, kept, fed, normed

                carry = (depth <= k, caches[k], outputs[k], own, own)
                _, caches[k], outputs[k], _, normed = jax.lax.while_loop(
                    lambda carry: carry[0], turn, carry
                )
            is_of = (depth == k) if k < last else (depth >= k)
            drafted = jnp.where(is_of, normed, drafted)
        reading = reading._replace(
            caches=tuple(caches), outputs=tuple(outputs), own=own, depth=depth
        )
        return reading, self._logits(params, drafted)

    def _one(
        self,
        params: EagleParams,
        k: int,
        cache: KVCache,
        tokens: Array,
        feature: Array,
        reads: Array,
    ) -> tuple[KVCache, Array, Array]:
        """Reads a pair of each row with layer k where `reads` [B]; returns the outputs [B, E]."""
        fed, normed, cache = read_pairs(
            self.network, _part(params, k), cache, tokens[:, None], feature[:, None]
        )
        return cache.commit(reads.astype(jnp.int32)), fed[:, 0], normed[:, 0]

    def read_tree(
        self,
        params: EagleParams,
        reading: LayersReading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[LayersReading, Array]:
        waiting = self._waiting(reading.caches, reading.outputs)
        last, itself = self.num_layers - 1, jnp.eye(tokens.shape[1], dtype=bool)
        caches, fed, drafted = list(reading.caches), reading.nodes[:, :0], None
        for k in range(1, self.num_layers):
            root = waiting[k - 1]
            if k == 1:  # of which only the first level is asked for
                features = jnp.broadcast_to(root[:, None], (*tokens.shape, root.shape[-1]))
            else:
                features = parents_of(root, fed, depth, mask)
            if k == last:
                below = parents_of(reading.own, reading.nodes, depth, mask)
                features = jnp.where((depth >= last)[:, None], below, features)
            # Near the start of a text there is no output for the first levels to read.
            missing = jnp.maximum(k - reading.caches[0].length, 0)[:, None]  # levels
            seen = mask & ((depth >= missing)[:, None] | itself)
            positions = jnp.maximum(depth - missing, 0)
            fed, normed, caches[k] = read_pairs(
                self.network, _part(params, k), caches[k], tokens, features, positions, seen
            )
            wanted = at_index(normed, at)
            levels = jnp.take_along_axis(jnp.broadcast_to(depth, tokens.shape), at, axis=1)
            is_of = (jnp.minimum(levels, last - 1) == k - 1)[..., None]
            drafted = wanted if drafted is None else jnp.where(is_of, wanted, drafted)
        assert drafted is not None
        reading = reading._replace(caches=tuple(caches), nodes=fed)
        return reading, self._logits(params, drafted)

    def known(self, params: EagleParams, reading: LayersReading, tokens: Array) -> Array:
        """Returns [B, N] bool: False for the pending token of a row without any feature."""
        return jnp.ones(tokens.shape, bool).at[:, 0].set(reading.readable)

    def end(
        self,
        params: EagleParams,
        state: LayersState,
        reading: LayersReading,
        proposal: Proposal,
    ) -> LayersState:
        pairs = zip(reading.caches, state.caches, strict=True)
        caches = tuple(own.rewind(earlier) for own, earlier in pairs)
        return dataclasses.replace(state, caches=caches, outputs=reading.outputs)

    def _committed(
        self, params: EagleParams, state: LayersState, tokens: Array, features: Array, count: Array
    ) -> tuple[tuple[KVCache, ...], tuple[Array, ...], Array, Array]:
        """Reads the pairs of committed tokens with every layer.

        Args:
          tokens, features, count: of the pairs of layer 0, as `paired` returns them.

        Returns:
          The caches, the outputs that are kept, and of layer 0 what is fed back [B, W, E] and what
          the head reads.
        """
        waiting = self._waiting(state.caches, state.outputs)
        caches, outputs = list(state.caches), list(state.outputs)
        features, first = by_row(features, caches[0]), None
        for k in range(self.num_layers):
            if k > 0:
                waits = state.caches[k - 1].length > 0
                tokens, features, count = paired(waiting[k - 1], waits, tokens, features, count)
            kept = outputs[k] if k < len(outputs) else None
            caches[k], kept, made = self._all(params, k, caches[k], kept, tokens, features, count)
            first, features = first or made, made[0]
            if kept is not None:
                outputs[k] = kept
        assert first is not None
        return tuple(caches), tuple(outputs), *first

    def _all(
        self,
        params: EagleParams,
        k: int,
        cache: KVCache,
        outputs: Array | None,
        tokens: Array,
        features: Array,
        count: Array,
    ) -> tuple[KVCache, Array | None, tuple[Array, Array]]:
        """Reads `count` [B] pairs with layer k, and commits them."""

        def read(
            held: tuple[KVCache, Array | None], start: Array | int, pairs: tuple[Array, Array]
        ) -> tuple[tuple[KVCache, Array | None], tuple[Array, Array]]:
            cache, outputs = held
            fed, normed, staged = read_pairs(self.network, _part(params, k), cache, *pairs)
            outputs = None if outputs is None else _kept(cache, outputs, fed)
            cache = staged.commit(jnp.clip(count - start, 0, fed.shape[1]))
            return (cache, outputs), (fed, normed)

        held, made = in_chunks(read, (cache, outputs), (tokens, features))
        return *held, made

    def _waiting(self, caches: tuple[KVCache, ...], outputs: tuple[Array, ...]) -> list[Array]:
        """Returns of each layer but the last its output [B, E] that is in no pair yet."""
        slots = [jnp.maximum(cache.length - 1, 0)[:, None] for cache in caches]
        return [at_index(x[:, 0], slot)[:, 0] for x, slot in zip(outputs, slots, strict=False)]

    def _logits(self, params: EagleParams, normed: Array) -> Array:
        product = self.network.dot_general
        return head_logits(params, normed, self.vocab_size, self.head_tokens, product)


_Carry = tuple[Array, KVCache, Array, Array, Array]
"""Whether the loop goes on, the cache and the outputs of a layer, and its two last outputs."""


def _kept(cache: KVCache, outputs: Array, new: Array) -> Array:
    """Returns the outputs with `new` [B, N, E] at the slots after the committed ones."""
    at = cache.sharding
    if at is not None:
        at = NamedSharding(at.mesh, PartitionSpec(*at.spec[:1]))
    return stage(outputs, new[:, None], cache.length, at, spare=True)


def _part(params: EagleParams, k: int) -> EagleParams:
    """Returns the parameters with those of layer k as the network's."""
    network = params.own["network"][part_name(k)]
    return dataclasses.replace(params, own=cast(EagleOwn, {**params.own, "network": network}))
