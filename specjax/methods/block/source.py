"""`BlockDraftSource`: fills a block of mask tokens in one pass (DFlash, DSpark, Domino)."""

from __future__ import annotations

import dataclasses
import functools
from typing import NotRequired

import jax.numpy as jnp
from flax import struct
from flax.traverse_util import unflatten_dict
from jax import Array
from jax.sharding import PartitionSpec

from specjax._internal.checks import real
from specjax.caches import KVCache
from specjax.contract import BlockSource, Context, Corrected
from specjax.methods.block.correction import Correction, Slot
from specjax.methods.block.network import BlockDraft, block_axes, read_block, stage_context
from specjax.methods.published import PublishedSource, SharedParams, embedding_of, head_of
from specjax.models import Tables, TransformerConfig, look_up, on_target
from specjax.parallel import Specs
from specjax.types import Block, Weights


class BlockOwn(Tables):
    """The parameters of a block draft."""

    draft: Weights
    correction: Weights  # where it has one
    to_draft: NotRequired[Array]  # [V] the draft's token for each of the target's, or negative


@struct.dataclass
class BlockDraftState:
    cache: KVCache  # keys and values of the committed tokens, as the draft's layers project them
    fresh: Array  # [B, D + 1, F] the target's hidden states at tokens that the cache lacks
    count: Array  # [B] the number of those tokens


@struct.dataclass
class _Reading:
    """The outputs of one pass, for the corrections."""

    state: BlockDraftState
    hidden: Array  # [B, D, H]
    logits: Array  # [B, D, U] float32


@dataclasses.dataclass(frozen=True)
class BlockDraftSource(
    PublishedSource, BlockSource[SharedParams[BlockOwn], BlockDraftState, _Reading, Array]
):
    """A block draft as a source: it reads hidden states of the target, the pending token and masks.

    `observe` stores the hidden states of the committed tokens, and the next `marginals` projects
    them to keys and values.  The target's last accepted block is never read by the layers.

    Reference: `specjax.methods.block.network`; the corrections name theirs.

    The parameters `SharedParams.own` are `draft`, of `BlockDraft`; `correction`; and where the
    draft has them `embedding`, `head`, and `to_draft` [V], the draft's token for each of the
    target's, or a negative number where there is none.

    Attributes:
      net: the layers.
      vocab_size: the target's.
      taps: layers of the target whose outputs the draft reads, concatenated in this order.
      correction: conditions each draft on the one before; None: drafts of a block are independent.
      confidence_threshold: a chain or a path ends before the first draft whose estimated
        acceptance is below it; 0 switches it off.  The estimate is the correction's.
    """

    net: BlockDraft
    vocab_size: int
    taps: tuple[int, ...] = ()
    correction: Correction | None = None
    confidence_threshold: float = 0.0
    waits = True

    def __post_init__(self) -> None:
        if not self.taps:
            raise ValueError("taps is empty; name the layers of the target that the draft reads")
        note = ", and 0 switches it off"
        real("confidence_threshold", self.confidence_threshold, "[0, 1]", note)
        if self.confidence_threshold > 0 and not (
            self.correction is not None and self.correction.estimates
        ):
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} needs a confidence head, and "
                "this draft has none: leave it at 0"
            )
        self.declare(depth=self.net.config.num_drafts, corrects=self.correction is not None)

    @property
    def layers(self) -> TransformerConfig:
        return self.net.config.layers

    def axes(self) -> Specs:
        found: dict[str, PartitionSpec | Specs | None] = {"draft": block_axes(self.net)}
        if self.correction is not None:
            named = self.correction.axes()
            specs = {p: PartitionSpec(*named.get(p, ())) for p in self.correction.shapes()}
            found["correction"] = unflatten_dict(specs)
        return found

    def init(self, params: SharedParams[BlockOwn], prompt: Block, capacity: int) -> BlockDraftState:
        config, width = self.net.config, self.depth + 1
        # After the committed tokens there is room for those that are not projected yet, or for a
        # block.
        size = capacity + max(width, config.block_size)
        dtype = embedding_of(params).dtype
        cache = self.net.init_cache(len(prompt.tokens), size, dtype)
        fresh = jnp.zeros((len(prompt.tokens), width, config.feature_size), dtype)
        return BlockDraftState(cache, fresh, jnp.zeros_like(prompt.count))

    def read(
        self, params: SharedParams[BlockOwn], state: BlockDraftState, block: Block
    ) -> BlockDraftState:
        assert block.features is not None  # the source has taps
        features = block.features.astype(state.fresh.dtype)
        cache = stage_context(self.net, params.own["draft"], features, state.cache)
        return dataclasses.replace(state, cache=cache.commit(block.count))

    def truncate(
        self, state: BlockDraftState, count: Array, last: Array | None
    ) -> BlockDraftState | None:
        cache = state.cache.truncate(count)
        if cache is None:
            return None
        return dataclasses.replace(state, cache=cache, count=jnp.zeros_like(state.count))

    def catch_up(self, params: SharedParams[BlockOwn], state: BlockDraftState) -> BlockDraftState:
        cache = stage_context(self.net, params.own["draft"], state.fresh, state.cache)
        cache, nothing = cache.commit(state.count), jnp.zeros_like(state.count)
        return dataclasses.replace(state, cache=cache, count=nothing)

    def observe(
        self, params: SharedParams[BlockOwn], state: BlockDraftState, block: Block
    ) -> BlockDraftState:
        assert block.features is not None
        width = min(state.fresh.shape[1], block.features.shape[1])
        new = block.features[:, :width].astype(state.fresh.dtype)
        return dataclasses.replace(
            state, fresh=state.fresh.at[:, :width].set(new), count=block.count
        )

    def marginals(
        self, params: SharedParams[BlockOwn], state: BlockDraftState, context: Context
    ) -> tuple[Array, Array, _Reading]:
        config, rows = self.net.config, len(context.pending)
        cache = stage_context(self.net, params.own["draft"], state.fresh, state.cache)
        cache = cache.commit(state.count)
        masks = jnp.full((rows, config.block_size - 1), config.mask_token, jnp.int32)
        block = jnp.concatenate([context.pending[:, None], masks], axis=1)
        hidden, cache = read_block(self.net, params.own["draft"], self._embed(params, block), cache)
        hidden = hidden[:, config.first_slot :]
        head = head_of(params)
        logits = self.net.dot_general(hidden, head, (((2,), (0,)), ((), ()))).astype(jnp.float32)
        if config.output_scale != 1.0:
            logits = logits * config.output_scale
        if (cap := config.logit_softcap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        state = dataclasses.replace(state, cache=cache, count=jnp.zeros_like(state.count))
        reading = _Reading(state, hidden, logits)
        return self._on_target(params, logits), jnp.ones(rows, bool), reading

    def correct(
        self,
        params: SharedParams[BlockOwn],
        reading: _Reading,
        depth: int,
        previous: Array,
        memory: Array | None,
    ) -> Corrected[Array]:
        assert self.correction is not None
        slot = Slot(
            depth,
            reading.hidden[:, depth],
            reading.logits[:, depth],
            previous,
            functools.partial(self._embed, params, previous),
        )
        logits, memory = self.correction.correct(params.own["correction"], slot, memory)
        goes_on = None
        if self.confidence_threshold > 0:
            sure = self.correction.confidence(params.own["correction"], slot)
            goes_on = sure >= self.confidence_threshold
        return Corrected(self._on_target(params, logits), memory, goes_on)

    def end(self, reading: _Reading) -> BlockDraftState:
        return reading.state

    def _embed(self, params: SharedParams[BlockOwn], tokens: Array) -> Array:
        x = look_up(embedding_of(params), tokens)
        scale = self.net.config.embedding_scale
        return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)

    def _on_target(self, params: SharedParams[BlockOwn], logits: Array) -> Array:
        return on_target(logits, self.vocab_size, params.own.get("to_draft"))
