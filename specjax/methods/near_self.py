"""`NearSelfSource`: the target drafts for itself, with the first and the last tokens only."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from specjax._internal.checks import counts, settle, within
from specjax.caches import KVCache
from specjax.contract import Context, Loaded, Lookahead, Model, Source
from specjax.models import LinenModel, TransformerConfig
from specjax.proposers import Chain
from specjax.types import Block, Proposal, Weights


class NearReading(NamedTuple):
    cache: KVCache  # the few slots of the target's cache, and the drafts
    skipped: Array  # [B] the tokens between the first and the last ones


@dataclasses.dataclass(frozen=True)
class NearSelfSource(Source[Weights, KVCache | tuple[()], NearReading]):
    """The whole target, which sees the first `sinks` and the last `window` tokens of the text.

    It has the target's weights, and the keys and values that the target wrote.  In each step it
    copies those few slots, drafts behind the copy, and drops it.  So it needs no training, no cache
    of its own, and never has to catch up; only the drafts of a step read fewer keys and values.
    Therefore it pays only where these outweigh the weights: in long texts of many rows.

    Reference: the sinks and the window are those of StreamingLLM (Xiao et al. 2023, arXiv
    2309.17453, section 3.2); as a draft, Sun et al. 2024 (TriForce), arXiv 2404.11912, section 4.

    Attributes:
      target: whose text is decoded.
      window: tokens, the last ones, at least 1.
      sinks: tokens, the first ones, at least 0.
      room: the most nodes that a step drafts, the root included.

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
    shares_cache = True

    def __post_init__(self) -> None:
        counts(window=self.window, sinks=self.sinks, room=self.room)
        within("window", self.window, 1)
        within("room", self.room, 2)
        within("sinks", self.sinks, 0)
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
        )
        self.declare(vocab_size=self.target.vocab_size)

    def bind(self, target: Loaded, draft: Loaded | None) -> Weights:
        if self.target != target.model:
            raise ValueError(
                f"the source was made for another target than {target.name}; pass target.model "
                "to it"
            )
        return cast(Weights, target.params)

    def init(
        self, params: Weights, prompt: Block, capacity: int, lookahead: Lookahead
    ) -> tuple[()]:
        if lookahead.staged > self.room:
            raise ValueError(
                f"a step drafts {lookahead.staged} nodes, and room={self.room}: pass "
                f"room={lookahead.staged} to the source, or draft fewer"
            )
        return ()

    def begin(
        self, params: Weights, state: KVCache | tuple[()], context: Context
    ) -> tuple[KVCache, NearReading, Array]:
        assert isinstance(state, KVCache)  # the target's
        near = state.near(self.sinks, self.window, self.room)
        reading = NearReading(near, state.length - near.length)
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

    def observe(
        self, params: Weights, state: KVCache | tuple[()], block: Block
    ) -> KVCache | tuple[()]:
        return state

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


def NearSelf(target: Model, window: int, sinks: int = 4, num_drafts: int = 4) -> Chain:
    """Drafts with the target in a window: `Chain(NearSelfSource(target, window, sinks), ...)`.

    Raises:
      ValueError: as `NearSelfSource`: a target or numbers that it cannot take.

    Example:
      >>> target = specjax.load(specjax.shipped("tiny/target"))
      >>> specjax.NearSelf(target.model, window=64, num_drafts=3).max_depth
      3
    """
    return Chain(NearSelfSource(target, window, sinks), num_drafts)
