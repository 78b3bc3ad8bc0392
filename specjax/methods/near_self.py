"""`NearSelfSource`: the target drafts for itself, with few tokens of its own cache."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import counts, settle, within
from specjax.caches import ChoosingCache, KVCache, chunks_of_turn, summarised
from specjax.contract import Context, Loaded, Lookahead, Model, Source
from specjax.models import AttentionSizes, LinenModel, TransformerConfig
from specjax.proposers import Chain
from specjax.types import Block, Proposal, Weights


class NearReading(NamedTuple):
    cache: KVCache  # the few slots of the target's cache, and the drafts
    skipped: Array  # [B] the tokens of the text that are not in it


@dataclasses.dataclass(frozen=True)
class NearSelfSource(Source[Weights, KVCache | tuple[()], NearReading]):
    """The whole target, which sees the first `sinks` and the last `window` tokens of the text.

    It has the target's weights, and the keys and values that the target wrote.  In each step it
    copies those few slots, drafts behind the copy, and drops it.  So it needs no training, no cache
    of its own, and never has to catch up; only the drafts of a step read fewer keys and values.
    Therefore it pays only where these outweigh the weights: in long texts of many rows.

    With `selected`, it also sees so many chunks of the tokens between.  In each step and layer each
    key head chooses those with which the queries of the pending token may have the greatest scores,
    and all drafts of the step see these.  Its state has two vectors for each chunk and key head.

    Reference: the sinks and the window are those of StreamingLLM (Xiao et al. 2023, arXiv
    2309.17453, section 3.2); as a draft, Sun et al. 2024 (TriForce), arXiv 2404.11912, section 4,
    with the scores of Tang et al. 2024 (Quest), arXiv 2406.10774, section 3.3.

    Attributes:
      target: whose text is decoded.
      window: tokens, the last ones, at least 1.
      sinks: tokens, the first ones, at least 0.
      room: the most nodes that a step drafts, the root included.
      selected: chunks that queries choose, at least 0.
      chunk: tokens of a chunk, at least 1.

    Raises:
      ValueError: a target or numbers that it cannot take.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> source = specjax.NearSelfSource(target.model, window=64)
      >>> specjax.Chain(source, 4).max_depth
      4
    """

    target: Model
    window: int
    sinks: int = 4
    room: int = 64
    selected: int = 0
    chunk: int = 32

    def __post_init__(self) -> None:
        counts(
            window=self.window, sinks=self.sinks, room=self.room, selected=self.selected,
            chunk=self.chunk,
        )  # fmt: skip
        within("window", self.window, 1)
        within("room", self.room, 2)
        within("sinks", self.sinks, 0)
        within("selected", self.selected, 0)
        within("chunk", self.chunk, 1)
        module = self.target.module if isinstance(self.target, LinenModel) else self.target
        config = getattr(module, "config", None)
        if not isinstance(config, TransformerConfig):
            raise ValueError(
                "only a target over specjax.Transformer can draft for itself in a window, and "
                f"this one is a {type(module).__name__}: pass target.model of what specjax.load "
                "returns"
            )
        layers = range(config.num_layers)
        settle(
            (
                any(config.has_state(layer) for layer in layers),
                "the target has layers with a recurrent state, which cannot be cut to a window: "
                "use another proposer",
            ),
            (
                any(config.window_of(layer) for layer in layers),
                "the target has layers with a window of their own, whose caches are rings: use "
                "another proposer",
            ),
            (
                self.selected
                and not all(
                    isinstance(config.mixer_of(layer), AttentionSizes | None) for layer in layers
                ),
                f"selected={self.selected}, and the target has latent attention, whose keys come "
                "in parts: leave selected out",
            ),
        )
        # The bounds of chunks are a state; without them the state is the target's cache.
        own = bool(self.selected)
        self.declare(vocab_size=self.target.vocab_size, shares_cache=not own, resumes=own)

    def bind(self, target: Loaded, draft: Loaded | None) -> Weights:
        if self.target != target.model:
            raise ValueError(
                f"the source was made for another target than {target.name}; pass target.model "
                "to it"
            )
        return cast(Weights, target.params)

    def init(
        self, params: Weights, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> KVCache | tuple[()]:
        if lookahead.staged > self.room:
            raise ValueError(
                f"a step drafts {lookahead.staged} nodes, and room={self.room}: pass "
                f"room={lookahead.staged} to the source, or draft fewer"
            )
        if not self.selected:
            return ()
        unrounded = self.target
        if isinstance(unrounded, LinenModel):
            unrounded = dataclasses.replace(unrounded, cache_dtype=None)
        slots = capacity // self.chunk + chunks_of_turn(self.chunk)
        chunks = cast(KVCache, unrounded.init_cache(len(prompt.tokens), slots))
        return dataclasses.replace(chunks, by_kernel=False, may_have_pages=False)

    def begin(
        self, params: Weights, state: KVCache | tuple[()], context: Context
    ) -> tuple[KVCache, NearReading, Array]:
        assert isinstance(state, KVCache)
        if not self.selected:  # the state is the target's cache
            near = state.near(self.sinks, self.window, self.room)
            reading = NearReading(near, state.length - near.length)
            return state, *self.extend(params, reading, context.pending)
        cache = cast(KVCache, context.cache)
        # A step commits fewer chunks than a turn takes; those of a prompt are read before.
        state = summarised(state, cache, self.sinks, self.chunk, once=True)
        choosing = ChoosingCache(
            cache, state, self.sinks, self.window, self.chunk, self.selected, self.room
        )
        # The pass over the pending token leaves a cache of what its queries have chosen.
        reading = NearReading(cast(KVCache, choosing), cache.length - choosing.length)
        return state, *self.extend(params, reading, context.pending)

    def extend(
        self, params: Weights, reading: NearReading, tokens: Array
    ) -> tuple[NearReading, Array]:
        at = jnp.zeros_like(tokens)[:, None]
        reading, logits = self._read(params, reading, tokens[:, None], at)
        cache = reading.cache.commit(jnp.ones_like(tokens))
        return reading._replace(cache=cache), logits[:, 0]

    def read_tree(
        self,
        params: Weights,
        reading: NearReading,
        tokens: Array,
        at: Array,
        depth: Array,
        mask: Array,
    ) -> tuple[NearReading, Array]:
        return self._read(params, reading, tokens, at, depth, mask)

    def end(
        self,
        params: Weights,
        state: KVCache | tuple[()],
        reading: NearReading,
        proposal: Proposal,
    ) -> KVCache | tuple[()]:
        return state

    def read(
        self, params: Weights, state: KVCache | tuple[()], block: Block
    ) -> KVCache | tuple[()]:
        if not isinstance(state, KVCache) or block.cache is None:
            return state
        return summarised(state, block.cache, self.sinks, self.chunk)

    def catch_up(self, params: Weights, state: KVCache | tuple[()]) -> KVCache | tuple[()]:
        return state

    def observe(
        self, params: Weights, state: KVCache | tuple[()], block: Block
    ) -> KVCache | tuple[()]:
        return state

    def truncate(
        self, state: KVCache | tuple[()], count: Array, last: Array | None
    ) -> KVCache | tuple[()]:
        if not isinstance(state, KVCache):
            return state
        whole = jnp.maximum(count - self.sinks, 0) // self.chunk
        return dataclasses.replace(state, length=jnp.minimum(state.length, whole))

    def rest(self, state: KVCache | tuple[()]) -> KVCache | tuple[()]:
        return state

    def resume(
        self,
        params: Weights,
        state: KVCache | tuple[()],
        text: Array,
        length: Array,
        wanted: Array,
    ) -> KVCache | tuple[()]:
        return state  # `begin` reads what the target's cache has

    def _read(
        self,
        params: Weights,
        reading: NearReading,
        tokens: Array,
        at: Array,
        depth: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[NearReading, Array]:
        """Stages tokens [B, T] behind the copy, at their positions in the text."""
        cache, width = reading.cache, tokens.shape[1]
        along = jnp.arange(width) if depth is None else depth
        positions = (cache.length + reading.skipped)[:, None] + along
        out = self.target.apply(params, tokens, positions, cache, mask)
        logits = jnp.take_along_axis(out.logits, at[..., None], axis=1).astype(jnp.float32)
        return reading._replace(cache=out.staged), logits


def NearSelf(
    target: Model,
    window: int,
    sinks: int = 4,
    num_drafts: int = 4,
    selected: int = 0,
    chunk: int = 32,
) -> Chain:
    """Drafts with the target and few tokens: `Chain(NearSelfSource(target, window, sinks), ...)`.

    `selected` and `chunk` are those of the source.

    Raises:
      ValueError: as `NearSelfSource`: a target or numbers that it cannot take.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> specjax.NearSelf(target.model, window=64, num_drafts=3, selected=4).max_depth
      3
    """
    source = NearSelfSource(
        target, window, sinks, max(64, num_drafts + 1), selected=selected, chunk=chunk
    )
    return Chain(source, num_drafts)
